"""Record of one run of `benchmarks.goodput`: its steps as they were seen, and its faults."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Seen:
    """Step that was recorded, as it was seen: seconds since the run began, start, generation and step."""

    at_s: float
    start: int
    generation: int
    step: int

    @property
    def life(self) -> tuple[int, int]:
        return self.start, self.generation


@dataclass(frozen=True)
class Moment:
    """Moment of one fault."""

    at_s: float
    kind: str
    of_node: bool
    ended_run: bool = False
    """True if the run ended of it, so that it had to be started again."""


@dataclass
class Story:
    """All that happened in a run."""

    began: float = 0.0
    """Time at which it was started, in seconds since the epoch."""
    seconds: float = 0.0
    done: bool = False
    starts: int = 0
    seen: list[Seen] = field(default_factory=list)
    redone: list[int] = field(default_factory=list)
    """Steps that were recorded and then done again, for each time that the ranks started again."""
    moments: list[Moment] = field(default_factory=list)
    not_made: list[str] = field(default_factory=list)
    """Faults that found no victim."""
    output: str = ""

    def recovery_s(self, moment: Moment) -> float | None:
        """Returns the seconds from a fault to the next new step of ranks that started after it."""
        before = [seen for seen in self.seen if seen.at_s <= moment.at_s]
        life = before[-1].life if before else (0, 0)
        reached = max((seen.step for seen in self.seen if seen.life <= life), default=0)
        for seen in self.seen:
            if seen.at_s > moment.at_s and seen.life > life and seen.step > reached:
                return seen.at_s - moment.at_s
        return None

    def write(self, path: Path) -> None:
        """Writes all of it but the output."""
        path.write_text(json.dumps({**asdict(self), "output": ""}))


def read_story(path: Path) -> Story:
    """Returns what `Story.write` wrote. Raises OSError."""
    told: dict[str, Any] = json.loads(path.read_text())
    told["seen"] = [Seen(**each) for each in told["seen"]]
    told["moments"] = [Moment(**each) for each in told["moments"]]
    return Story(**told)
