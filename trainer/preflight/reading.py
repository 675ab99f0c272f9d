"""What one rank found out about its place before training. No torch: `judge.py` compares readings of all ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. An error ends the run before it trains; a warning is shown."""

    severity: Severity
    check: str
    text: str
    """Where, what was found, what is expected, what to do."""


@dataclass(frozen=True)
class Timing:
    """One collective, or copy, of so many bytes a rank, on the clock of that rank."""

    bytes: int
    seconds: float
    """The median of some repeats."""

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds


@dataclass(frozen=True)
class Gpu:
    """A rank's GPU as NVML sees it."""

    name: str
    free_bytes: int
    total_bytes: int
    uncorrected_errors: int
    """ECC, since the driver was loaded; 0 where the GPU has no ECC."""
    slowed_by: tuple[str, ...]
    """Why the clocks are held down, of the reasons that should not be."""
    other_processes: int
    """That compute on it and are not this rank's."""


@dataclass(frozen=True)
class Reading:
    """Of one rank. `None` where the machine has no such thing, or it could not be read."""

    rank: int
    local_rank: int
    node: str
    shm_bytes: int | None
    """Free in /dev/shm."""
    open_files: int
    """The process' soft limit."""
    disk_bytes: int | None
    """Free where the run folder is."""
    clock_s: float
    """Seconds since the epoch, read when all ranks left the same barrier."""
    wrong: tuple[str, ...] = ()
    """Collectives that did not give what they must, with what they gave."""
    timings: Mapping[str, Timing] = field(default_factory=dict)
    """By name: "all_reduce", "all_gather", "latency", "host to device"."""
    pairs: Mapping[str, Timing] = field(default_factory=dict)
    """By the node (or, on one node, the rank) that this rank swapped a message with."""
    gpu: Gpu | None = None
