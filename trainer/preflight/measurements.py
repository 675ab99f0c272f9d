"""Measurements of one rank's host before training. No torch: `findings.py` compares those of all ranks.

Here they are also summed up over nodes, and their sizes and rates written for people.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One problem. An error ends the run before it trains; a warning is shown."""

    severity: Severity
    check: str
    text: str
    """Text that says where, what was found, what is expected and what to do."""
    node: str = ""
    """Node whose hardware does badly, of several; "" if no single node is to blame."""


@dataclass(frozen=True)
class Timing:
    """Time of one collective, or copy, of `bytes` bytes per rank, on that rank's clock."""

    bytes: int
    seconds: float
    """Median of some repeats, in seconds."""

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
    """Uncorrected ECC errors since the driver was loaded; 0 if the GPU has no ECC."""
    slowed_by: tuple[str, ...]
    """Reasons that hold the clocks down, only those that mean a problem."""
    other_processes: int
    """Number of other processes that compute on the GPU."""


@dataclass(frozen=True)
class Rdma:
    """RDMA devices of a rank's node (InfiniBand, RoCE, EFA), and whether its NCCL uses one."""

    devices: tuple[str, ...]
    """Devices with an active port, with their speed: "mlx5_0 400 Gb/s"."""
    opened: bool
    """True if this process holds one of them open, as NCCL does from its start if it can use it."""
    refused_by: str = ""
    """Variable that tells NCCL not to use them, as NAME=VALUE; "" if none does."""


@dataclass(frozen=True)
class Placement:
    """Places of a rank's GPU, CPUs and closest network adapters in its node."""

    gpu: str
    """PCI address of the GPU."""
    numa_node: int | None
    cpus: str
    """CPUs that the rank may use, as the kernel lists them: "0-31,64-95"."""
    near: bool
    """True if all of them are next to the GPU."""
    apart: bool
    """True if none of them is, as far as the kernel knows."""
    adapters: tuple[str, ...]
    """Network adapters that are closest to the GPU."""
    closeness: str
    """Words for how close these are, as the end of a sentence; "" if the node has none."""


@dataclass(frozen=True)
class Needs:
    """Estimate of what the job needs on each node."""

    shm_bytes: int
    """Bytes of batches on their way from loader processes to ranks."""
    open_files: int
    checkpoint_bytes: int
    checkpoints: int
    """Number of checkpoints that are kept at once, with the one that is being written."""
    fabric: str | None = None
    """Network that the job says its nodes have; None if it does not say, or computes on CPUs."""


@dataclass(frozen=True)
class Measurements:
    """Measurements of one rank.

    None means that the machine has no such thing, or that it could not be read.
    """

    rank: int
    local_rank: int
    node: str
    shm_bytes: int | None
    """Free bytes in /dev/shm."""
    open_files: int
    """Soft limit of the process."""
    disk_bytes: int | None
    """Free bytes in the run folder's file system."""
    clock_s: float
    """Seconds since the epoch, read when all ranks left the same barrier."""
    locked_bytes: int | None = None
    """Bytes that the process may lock in memory; None also where nothing limits them."""
    wrong: tuple[str, ...] = ()
    """Collectives that gave wrong values, with those values."""
    timings: Mapping[str, Timing] = field(default_factory=dict)
    """Timings by name: "all_reduce", "all_gather", "latency", "host to device", "within the GPU"."""
    pairs: Mapping[str, Timing] = field(default_factory=dict)
    """Timings by the node (or, on one node, the rank) that this rank swapped a message with."""
    gpu: Gpu | None = None
    tflops: float | None = None
    """Matrix products of the GPU in bf16, in 10^12 operations a second; None for a rank on the CPU."""
    rdma: Rdma | None = None
    """RDMA devices; None also for a rank on the CPU, whose collectives use TCP in any case."""
    placement: Placement | None = None
    """Places in the node; None for a rank on the CPU, or if NVML does not know the GPU's address."""
    open_clip: str = ""
    """Release of open_clip_torch; "" if it is not known."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> "Measurements":
        """Returns the measurements from a table that `dataclasses.asdict` made."""
        nested = {
            name: {of: Timing(**timing) for of, timing in table[name].items()}
            for name in ("timings", "pairs")
        }
        devices = {
            name: kind(**table[name]) if table[name] else None
            for name, kind in (("gpu", Gpu), ("rdma", Rdma), ("placement", Placement))
        }
        return cls(**{**table, **nested, **devices})


def pair_speeds(measurements: Sequence[Measurements]) -> dict[str, float]:
    """Returns bytes per second of each node in its best pair, summed over its ranks.

    On a single node it returns those of each rank.
    """
    several = len({r.node for r in measurements}) > 1
    speeds: dict[str, dict[str, float]] = {}
    for r in measurements:
        by_partner = speeds.setdefault(r.node if several else f"rank {r.rank}", {})
        for partner, timing in r.pairs.items():
            by_partner[partner] = by_partner.get(partner, 0.0) + timing.bytes_per_s
    return {
        node_or_rank: max(by_partner.values()) for node_or_rank, by_partner in speeds.items() if by_partner
    }


def odd_node(affected: Iterable[Measurements], measurements: Iterable[Measurements]) -> str:
    """Returns the one node of several that is affected, "" if there is no such node."""
    nodes = {r.node for r in affected}
    return nodes.pop() if len(nodes) == 1 and len({r.node for r in measurements}) > 1 else ""


def nodes_of(measurements: Sequence[Measurements]) -> str:
    """Returns the nodes of the measurements by name, at most four of them."""
    nodes = list(dict.fromkeys(r.node for r in measurements))
    return ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more nodes" if len(nodes) > 4 else "")


def size(count: float) -> str:
    """Returns bytes in binary units, such as `512 MiB` or `1.5 GiB`."""
    for name in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {name}"
        count /= 1024
    return f"{count:,.1f} GiB"


def rate(bytes_per_s: float) -> str:
    """Returns a speed in GB/s, the unit of network and PCIe figures."""
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def figures(measurements: Sequence[Measurements]) -> Mapping[str, tuple[float, Measurements]]:
    """Returns, for each timing, the slowest rank's seconds and that rank's measurements.

    A step waits for the slowest rank.
    """
    names = dict.fromkeys(name for r in measurements for name in r.timings)
    return {
        name: max(
            ((r.timings[name].seconds, r) for r in measurements if name in r.timings),
            key=lambda timing: timing[0],
        )
        for name in names
    }
