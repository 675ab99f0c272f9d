"""Stands for the supervisor of a coordinator in tests that tell it messages: it records and answers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord
from trainer.run.generations import GenerationClaim
from trainer.supervise.context import SupervisorContext
from trainer.supervise.coordinate.membership import Membership
from trainer.supervise.coordinate.run_state import RunState
from trainer.supervise.limits import Limits
from trainer.supervise.machine import Machine
from trainer.supervise.messages import Message
from trainer.supervise.network.tree_plan import TreePlan
from trainer.world.launchers import World
from trainer.world.variables import STARTS_AGAIN


@dataclass
class StubSupervisor(Machine):
    """Machine, rank, end and connections of a supervisor; without `has_tree` it has no connections."""

    step: float = 1.0
    begun: bool = True
    kept: int = 0
    reached: dict[str, float] = field(default_factory=dict)
    has_tree: bool = False
    said: list[Message] = field(default_factory=list)
    records: list[ExitRecord] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def broadcast(self, message: Message) -> None:
        self.said.append(message)

    # Its machine.

    def say(self, line: str) -> None:
        self.lines.append(line)

    def newest_kept(self, env: Mapping[str, str]) -> int:
        return self.kept

    # Its rank.

    def state(self) -> Any:
        return SimpleNamespace(steps_done=self.step)

    @property
    def has_begun(self) -> bool:
        return self.begun

    def moments(self) -> Mapping[str, float]:
        return self.reached

    async def choose_meeting(self) -> Mapping[str, str]:
        return {}

    # Its end.

    def leave(self, reason: str) -> None:
        self.left.append(reason)

    def finish(self, record: ExitRecord) -> None:
        self.records.append(record)

    async def claim(self, generation: int, world: str) -> GenerationClaim | None:
        return None


class StubTree:
    """It knows no addresses, and sends nothing."""

    ending = False
    address = "", 0

    def __init__(self) -> None:
        self.plan = TreePlan("")

    def drop(self, member: int) -> None:
        """It has no connections."""

    def down(self, message: Message) -> None:
        """It sends no roster."""


def run_state(
    ranks: Iterable[int],
    limits: Limits,
    exit_files: ExitFiles,
    stub: StubSupervisor,
    membership: Membership | None = None,
    *,
    member: int = 0,
    keeps_going: bool = False,
    starts_again: str = "",
    generation: int = 1,
) -> RunState:
    """Returns the state of a run whose coordinator is a part of the stub."""
    members = tuple(ranks)
    its: Any = stub
    tree: Any = StubTree() if stub.has_tree else None
    context = SupervisorContext(
        World(member, max(2, len(members)), 0, 1, f"n{member}", "clipship run", generation),
        limits,
        {STARTS_AGAIN: starts_again},
        exit_files,
        its,
        tree,
        keeps_going=keeps_going and limits.max_restarts > 0 and stub.has_tree,
        send_up=lambda message: None,
    )
    everybody = membership or Membership(members, len(members), len(members))
    run: Any = RunState(context, its, its, stub.broadcast, everybody, members)
    run.finish, run.claim = stub.finish, stub.claim
    state: RunState = run
    return state
