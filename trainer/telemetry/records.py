"""Values of one logged step, the times of several steps by part, and what is said if they cannot be written.

The modules that write them are elsewhere. No torch.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass

SO_FAR = "so_far"
"""Name of a table in each record of metrics.jsonl: the sums of the figures in SUMMED since the run began."""
SUMMED = ("gpu_joules", "read_requests", "read_bytes", "read_wait_s", "cache_hits")


@dataclass(frozen=True)
class Record:
    """Values of one logged step.

    Times are seconds per step, averaged since the previous record, on rank 0.
    """

    step: int
    epoch: int
    """Number of the epoch, from 0; people read it from 1."""
    samples: int
    loss: float
    lr: float
    grad_norm: float
    logit_scale: float
    samples_per_s: float
    step_s: float
    data_s: float
    compute_s: float
    comm_s: float
    checkpoint_s: float
    bad_samples: int = 0
    """Number of samples that all ranks have skipped since this start."""


@dataclass(frozen=True)
class Lap:
    """Times of several steps: seconds by part, summed over the steps."""

    steps: int = 0
    data_s: float = 0.0
    compute_s: float = 0.0
    comm_s: float = 0.0
    checkpoint_s: float = 0.0

    def __add__(self, other: "Lap") -> "Lap":
        return Lap(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def per_step(self) -> dict[str, float]:
        """Returns seconds per step by part, and `step_s`, their sum."""
        parts = {
            part: seconds / max(1, self.steps) for part, seconds in asdict(self).items() if part != "steps"
        }
        return {"step_s": sum(parts.values()), **parts}


log = logging.getLogger("clipship")


class Gaps:
    """Names each file or service that cannot be written, once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    @contextmanager
    def tolerated_in(self, what: str, problems: type[Exception] = OSError) -> Iterator[None]:
        """Lets the run go on where the block raises one of the problems, such as that the disk is full."""
        try:
            yield
        except problems as error:
            if what not in self._told:
                log.warning(
                    "%-12s NOT WRITTEN: %s. The run goes on, but %s will have gaps.", "metrics", error, what
                )
            self._told.add(what)
