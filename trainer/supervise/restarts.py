"""Decides whether a run goes on after a fault of a rank, and after which wait.

All decisions are pure: no clock, no process, no file. No torch.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainer.supervise.coordinate.membership import Exclusion, exclusions_from_json
from trainer.text.wording import many

_LONGEST_WAIT = 8
"""Longest wait before a restart, as a multiple of `backoff_s`."""
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(?:[.,]\d+)*")


Kind = Literal["fault", "lost", "unfit", "taken in"]


@dataclass(frozen=True)
class Fault:
    """Death or hang of a rank, which would end the run."""

    rank: int
    node: str
    step: int
    """Step that the rank was working on; 0 before the first."""
    cause: str
    lost: bool = False
    """True if the supervisor is gone, too, or the node is unfit: that is no bug of the program."""

    def is_like(self, other: "Fault") -> bool:
        """Returns whether rank, step and cause are the same.

        Numbers in the causes may differ: addresses, ports and processes are new in each generation.
        """
        if self.lost or other.lost:
            return False
        return (self.rank, self.step) == (other.rank, other.step) and _NUMBER.sub("N", self.cause) == (
            _NUMBER.sub("N", other.cause)
        )


@dataclass(frozen=True)
class Restart:
    """Restart of all ranks after a fault, as the run folder records it."""

    generation: int
    """Generation that the restart begins; the first restart begins generation 2."""
    cause: str
    rank: int
    node: str
    step: int
    """Step that the rank was working on; of a lost one (`kind`) the last step that was done."""
    from_step: int
    """Newest step that is in memory or on disk, from which the ranks go on; 0: from the beginning."""
    seconds: float | None = None
    """Seconds from the report of the fault to the end of the next new step; None if it never came."""
    details: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Those seconds by part, with the names of `restart_parts.PARTS`; empty while `seconds` is None."""
    time: float = 0.0
    """Time of the report of the fault, in seconds since the epoch."""
    kind: Kind = "fault"
    """fault: a rank failed; lost: its supervisor or node is gone; unfit: its node has failed the preflight;
    taken in: members came back."""
    ranks: int = 0
    """Size of the world from this restart on."""
    left_out: tuple[Exclusion, ...] = ()
    """Supervisors that are gone and nodes that do badly, which have no rank from here on."""
    saved_step: int = 0
    """Step of the newest checkpoint at the fault, 0 for none; the next coordinator counts with it."""
    new_step: bool = False
    """True if a step was done since the fault before that had never been done."""

    @property
    def steps_done(self) -> int:
        """Last step that was done before the fault; 0 if it is not known."""
        return max(0, self.step - 1) if self.kind == "fault" else self.step

    def to_json(self) -> dict[str, Any]:
        """Returns the restart as restarts.json has it."""
        return asdict(self)

    def summary(self) -> dict[str, Any]:
        """Returns the restart as exit.json and result.json have it: without the details."""
        return {name: value for name, value in asdict(self).items() if name != "details"}


def restart_from_json(row: Mapping[str, Any]) -> Restart:
    """Returns the restart that `to_json` wrote. Raises TypeError if it is none."""
    return Restart(**{**row, "left_out": exclusions_from_json(row.get("left_out", ()))})


@dataclass(frozen=True)
class GoOn:
    """Decision that the ranks are restarted."""

    number: int
    """Number of this restart since the last one that saved a checkpoint, from 1."""
    wait_s: float


@dataclass(frozen=True)
class GiveUp:
    """Decision that the run ends; `reason` is the end of a sentence about the fault."""

    reason: str


class RestartPolicy:
    """Counts faults of one start of a run and decides about each in turn."""

    def __init__(
        self,
        max_restarts: int,
        same_fault_limit: int,
        backoff_s: float,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`jitter` returns numbers from 0 to below 1."""
        self._max_restarts, self._same_fault_limit = max_restarts, same_fault_limit
        self._backoff_s, self._jitter = backoff_s, jitter
        self._restarts = 0
        self._fruitless = 0
        """Restarts in a row after which no new step was done and nothing was saved."""
        self._saved_step = 0
        self._last: Fault | None = None
        self._in_a_row = 0

    def restore(self, restarts: Sequence[Restart]) -> None:
        """Counts the restarts of another coordinator, whose place this one takes."""
        for each in restarts:
            if each.kind != "taken in":
                lost = each.kind in ("lost", "unfit")
                fault = Fault(each.rank, each.node, each.step, each.cause, lost=lost)
                self.decide(fault, each.saved_step, new_step=each.new_step)

    def decide(self, fault: Fault, saved_step: int, *, new_step: bool = False) -> GoOn | GiveUp:
        """Returns what to do about a fault; `saved_step` is the step of the newest checkpoint, 0 for none.

        `new_step` says that a step was done since the last fault that had never been done before.
        """
        if saved_step > self._saved_step:
            self._saved_step, self._restarts = saved_step, 0
        if new_step or not self._restarts:
            self._fruitless = 0
        self._in_a_row = self._in_a_row + 1 if self._last and fault.is_like(self._last) else 1
        self._last = fault
        if self._in_a_row >= self._same_fault_limit:
            return GiveUp(
                f"the same fault at the same step {self._in_a_row} times in a row looks like a bug and not "
                f"like a fault of a machine (recovery.same_fault_limit = {self._same_fault_limit})"
            )
        if self._restarts >= self._max_restarts:
            return GiveUp(
                f"{many(self._restarts, 'restart')} without a new checkpoint in between "
                f"{'is' if self._restarts == 1 else 'are'} all that recovery.max_restarts allows"
            )
        self._restarts += 1
        self._fruitless += 1
        return GoOn(self._restarts, self._wait_s())

    def _wait_s(self) -> float:
        """Returns the seconds before this restart; 0 for the first one since a new step or checkpoint."""
        if self._fruitless == 1:
            return 0.0
        factor = min(1 << (self._fruitless - 2), _LONGEST_WAIT)
        return self._backoff_s * factor * (1.0 - 0.5 * self._jitter())
