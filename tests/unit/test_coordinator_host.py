"""Roster that tells all supervisors who goes on in the coordinator's place, with no supervisor's process."""

import asyncio
import sys
from types import SimpleNamespace
from typing import cast

import pytest

from tests.support.terminal import LostConsole
from trainer.run.exit_files import ExitFiles
from trainer.supervise.context import SupervisorContext
from trainer.supervise.coordinate import coordinator_host, presence
from trainer.supervise.coordinate.coordinator_host import CoordinatorHost, ParentLoss
from trainer.supervise.ending import Ending
from trainer.supervise.limits import Limits
from trainer.supervise.machine import Machine
from trainer.supervise.messages import Joined, Message, Orphaned, Roster
from trainer.supervise.network.tree import Tree
from trainer.supervise.network.tree_plan import TreePlan
from trainer.supervise.rank.own_rank import OwnRank
from trainer.world.launchers import World


class TreeThatRecords:
    """It has what a roster needs of a tree."""

    def __init__(self) -> None:
        self.plan, self.address = TreePlan("n0"), ("h", 1)
        self.plan.parent(1, "n0", ("h", 2))
        self.sent: list[Message] = []

    def down(self, message: Message) -> None:
        self.sent.append(message)


class EndingThatIsNot:
    """It says that the run goes on."""

    code = None


def host_of_two(tree: TreeThatRecords) -> CoordinatorHost:
    """Returns the host of a coordinator of two ranks on one node, whose supervisors have both joined."""
    context = SupervisorContext(
        World(0, 2, 0, 2, "n0", "clipship"),
        Limits(max_restarts=3),
        {},
        ExitFiles(""),
        Machine(),
        cast(Tree, tree),
        keeps_going=True,
        send_up=lambda message: None,
    )
    host = CoordinatorHost(
        context, cast(OwnRank, None), cast(Ending, EndingThatIsNot()), lambda message: None
    )
    host.take()
    for member in (0, 1):
        host.receive(Joined(member, "n0"))
    return host


async def test_roster_is_sent_once_when_nobody_has_come_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "ROSTER_S", 0.05)
    tree = TreeThatRecords()

    host_of_two(tree)
    assert not tree.sent
    await asyncio.sleep(0.3)
    (roster,) = tree.sent
    assert isinstance(roster, Roster)
    assert roster.succession == ((0, ("h", 1)), (1, ("h", 2)))


async def test_roster_is_sent_at_once_when_a_generation_has_started() -> None:
    """A supervisor that has none cannot go on without its coordinator, and would end the run."""
    tree = TreeThatRecords()
    coordinator = host_of_two(tree).coordinator
    assert coordinator is not None
    coordinator._presence.send_roster()
    assert [type(each) for each in tree.sent] == [Roster]


async def test_a_lost_console_keeps_no_coordinator_from_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    console = LostConsole()
    monkeypatch.setattr(sys, "stderr", console)
    Machine().say("clipship: restart 1 of 3")
    assert console.lost == "clipship: restart 1 of 3"


@pytest.mark.parametrize(("has_rank", "way"), [(False, "unjoined"), (True, "alone")])
async def test_loss_above_one_that_has_had_no_rank_is_not_the_run_s_end(
    monkeypatch: pytest.MonkeyPatch, has_rank: bool, way: str
) -> None:
    """It came back a moment ago, so it has no roster; the others may go on without the one above it."""
    monkeypatch.setattr(coordinator_host, "ORPHAN_S", 0.01)
    ways: list[str] = []

    class EndingThatRecords:
        async def end_unjoined(self, *_: object) -> None:
            ways.append("unjoined")

        async def end_alone(self, *_: object) -> None:
            ways.append("alone")

    rank = SimpleNamespace(poll=lambda: None) if has_rank else None
    own = SimpleNamespace(generation=rank, state=lambda: SimpleNamespace(late=False))
    host = host_of_two(TreeThatRecords())
    loss = ParentLoss(host._context, cast(OwnRank, own), cast(Ending, EndingThatRecords()), host)
    loss.handle(Orphaned(0, "n0", "its connection closed"))
    await asyncio.sleep(0.1)
    assert ways == [way]
