"""All that the coordinator learns about one generation, and the failures that would end the run. No torch."""

from dataclasses import dataclass, field
from enum import IntEnum

from trainer.run.exit_record import ExitRecord
from trainer.supervise.coordinate.diagnosis import Diagnosis
from trainer.supervise.machine import now
from trainer.supervise.messages import Meeting
from trainer.supervise.rank.rank_report import RankReport
from trainer.supervise.restarts import Kind


class Weight(IntEnum):
    """Weight of a cause: how likely it follows from another one; the lightest is taken as the first."""

    KILLED = 0
    """SIGKILL, which never follows from another rank's failure."""
    GONE = 1
    """A supervisor is lost, and the launcher ends none after a failure elsewhere."""
    FAILED = 2
    LOST = 3
    """A supervisor is lost, which a launcher that ends all of them may have done after a failure."""
    FAILED_WAITING = 4
    """A rank failed inside a collective, so probably because another rank had ended."""


@dataclass(frozen=True)
class Failure:
    """Failure of a rank that would end the run."""

    record: ExitRecord
    step: int = 0
    """Step that the rank was working on."""
    diagnosis: Diagnosis | None = None
    """State of all ranks if a limit passed; it is written to the run folder when the run ends."""
    ras: str = ""
    others_there: bool = True
    """False if a supervisor is gone or does not answer."""
    kind: Kind = "fault"
    silent: tuple[int, ...] = ()
    """Members that do not answer."""
    saving: bool = True
    """False if it was a rank's in its work: then it says nothing about what comes when the rank saves."""
    at: float = field(default_factory=now)


@dataclass
class GenerationState:
    """All that the coordinator learns about one generation; the next generation gets a new one."""

    number: int
    members: tuple[int, ...] = ()
    """Members in the order of ranks; before the start those of the generation before."""
    ended: set[int] = field(default_factory=set)
    """Members that have no rank of the generation before any more."""
    kept: dict[int, int] = field(default_factory=dict)
    """Newest step that the node of each of them has kept in memory; 0 if it has none."""
    saved_step: int = 0
    """Step of the newest checkpoint when the ranks of the generation before had ended; 0 if there is none."""
    meeting: Meeting | None = None
    """Answer of rank 0's supervisor; None while there is none."""
    regrouped_again: bool = False
    steps_done: float = 0.0
    """Last step of rank 0 as its supervisor tells it, if that is not this one."""
    begun: bool = False
    """True if rank 0 has done anything that could be saved, told likewise."""
    moments: dict[str, float] = field(default_factory=dict)
    """Moments of rank 0's start, told likewise; on this process's clock."""
    growing: bool = False
    """True once the ranks were asked to save and leave, so that more of them can start."""
    done: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    causes: list[tuple[Weight, Failure]] = field(default_factory=list)
    reports: dict[int, RankReport] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    collecting: bool = False
    asked: bool = False
    """True once the launcher was asked to start all again."""

    @property
    def first_cause(self) -> tuple[Weight, Failure]:
        """The lightest cause, of equal ones the earliest. Raises ValueError if there is none."""
        return min(self.causes, key=lambda cause: (cause[0], cause[1].record.time))
