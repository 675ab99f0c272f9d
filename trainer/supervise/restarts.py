"""Restarts of the ranks within one start of a run, as the run folder records them. No torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainer.supervise.coordinate.membership import Exclusion, exclusions_from_json
from trainer.world.restart_policy import Fault

Kind = Literal["fault", "lost", "unfit", "taken in"]


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
    return Restart(**{**row, "left_out": exclusions_from_json(row.get("left_out", ()))})
