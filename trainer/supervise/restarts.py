"""Restarts of the ranks within one start of a run, as the run folder records them, and their seconds by part.

No torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainer.supervise.coordinate.membership import Exclusion, exclusions_from_json
from trainer.world.restart_policy import Fault

Kind = Literal["fault", "lost", "unfit", "taken in"]
PARTS: dict[str, str] = {
    "detect": "deciding",
    "end": "ending the ranks",
    "agree": "recording the restart",
    "wait": "waiting",
    "start": "starting processes",
    "connect": "connecting",
    "prepare": "preparing",
    "restore": "restoring",
    "first_step": "the first step",
    "redone": "steps done again",
}
"""Parts of a restart in their order, with the words for people."""
_OF_MOMENTS = {
    "running": "start",
    "connected": "connect",
    "prepared": "prepare",
    "restored": "restore",
    "stepped": "first_step",
}
"""Part that ends at a moment of rank 0's heartbeat."""
_SHOWN_S = 0.05


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
    """Those seconds by part, with the names of `PARTS`; empty while `seconds` is None."""
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

    @property
    def fault(self) -> Fault:
        """Fault after which it was made."""
        return Fault(self.rank, self.node, self.step, self.cause, lost=self.kind in ("lost", "unfit"))

    def to_json(self) -> dict[str, Any]:
        """Returns the restart as restarts.json has it."""
        return asdict(self)

    def summary(self) -> dict[str, Any]:
        """Returns the restart as exit.json and result.json have it: without the details."""
        return {name: value for name, value in asdict(self).items() if name != "details"}


def restart_from_json(row: Mapping[str, Any]) -> Restart:
    """Returns the restart that `to_json` wrote. Raises TypeError if it is none."""
    return Restart(**{**row, "left_out": exclusions_from_json(row["left_out"])})


class RestartClock:
    """Collects the times at which the parts of one restart ended; all times are of one clock, in seconds."""

    def __init__(self, began: float) -> None:
        """`began` is the time at which the fault was reported."""
        self._at = began
        self._parts: dict[str, float] = {}

    def end_part(self, part: str, at: float) -> None:
        """Records that a part of `PARTS` ended at this time, and with it every part before it."""
        self._parts[part] = round(max(0.0, at - self._at), 2)
        self._at = max(self._at, at)

    def end_ranks_parts(self, moments: Mapping[str, float]) -> None:
        """Records the parts that end at moments of rank 0's heartbeat; a missing moment is left out."""
        for moment, part in _OF_MOMENTS.items():
            if moment in moments:
                self.end_part(part, moments[moment])

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part; a part that did not occur is missing."""
        return dict(self._parts)


def parts_text(parts: Any) -> str:
    """Returns the parts in words, such as `starting processes 2.1 s, restoring 0.3 s`, without tiny ones.

    `parts` comes from a file: "" if it is no table of parts.
    """
    if not isinstance(parts, dict):
        return ""
    shown = ((words, parts.get(part)) for part, words in PARTS.items())
    return ", ".join(
        f"{words} {seconds:.1f} s"
        for words, seconds in shown
        if isinstance(seconds, int | float) and seconds >= _SHOWN_S
    )
