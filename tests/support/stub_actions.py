"""Stands for the supervisor of a coordinator in tests that tell it messages: it records and answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer.run.exit_record import ExitRecord
from trainer.run.generations import GenerationClaim
from trainer.supervise.messages import Message


@dataclass
class StubActions:
    """It has the methods of `Actions`."""

    step: float = 1.0
    begun: bool = True
    kept: int = 0
    reached: dict[str, float] = field(default_factory=dict)
    can_restart: bool = False
    can_claim: bool = False
    said: list[Message] = field(default_factory=list)
    records: list[ExitRecord] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def broadcast(self, message: Message) -> None:
        self.said.append(message)

    def finish(self, record: ExitRecord) -> None:
        self.records.append(record)

    def steps_done(self) -> float:
        return self.step

    def has_begun(self) -> bool:
        return self.begun

    def moments(self) -> Mapping[str, float]:
        return self.reached

    def in_memory(self) -> int:
        return self.kept

    def say(self, line: str) -> None:
        self.lines.append(line)

    async def fresh_variables(self) -> Mapping[str, str]:
        return {}

    async def claim(self, generation: int, world: str) -> GenerationClaim | None:
        return None

    def below(self, member: int) -> set[int]:
        return set()

    async def is_gone(self, member: int) -> bool:
        return False

    def forget(self, member: int) -> None:
        """It has no connections."""

    def members_changed(self) -> None:
        """It sends no roster."""

    def generation_started(self) -> None:
        """It sends no roster."""

    def leave(self, reason: str) -> None:
        self.left.append(reason)
