"""The coordinator's table of states, and what becomes of a run whatever the order in which things happen."""

import asyncio
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.support import clock
from tests.support.stub_supervisor import StubSupervisor, run_state
from tests.unit.test_diagnosis import COMPUTING
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_START_AGAIN, EXIT_TIMED_OUT
from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord
from trainer.supervise import messages
from trainer.supervise.background import on_error
from trainer.supervise.coordinate.coordinator import Coordinator
from trainer.supervise.coordinate.membership import Membership
from trainer.supervise.coordinate.states import (
    BETWEEN,
    TABLE,
    WITH_RANKS,
    Event,
    IllegalEvent,
    State,
    following,
)
from trainer.supervise.limits import Limits

MEMBERS = 3


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_event_leads_to_the_state_in_the_table_or_is_refused(state: State, event: Event) -> None:
    leads_to = TABLE[state].leads_to
    if event in leads_to:
        assert following(state, event) is leads_to[event]
    else:
        with pytest.raises(IllegalEvent, match=f"{event.name} .* in state {state.name}"):
            following(state, event)


def test_every_state_is_reached_from_the_first_and_leads_to_the_end() -> None:
    reached = {State.STARTING}
    for _ in State:
        reached |= {after for state in reached for after in TABLE[state].leads_to.values()}
    assert reached == set(State) == set(TABLE)
    for state in set(State) - {State.ENDED}:
        assert {Event.END, Event.CUT_OFF} <= TABLE[state].leads_to.keys()
    assert not TABLE[State.ENDED].leads_to
    assert not TABLE[State.ENDED].takes


def test_page_on_architecture_draws_each_state_and_event() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    drawn = page.partition("### States of a run")[2].partition("### The life of a fault")[0]
    assert [each.name for each in (*State, *Event) if each.name not in re.findall(r"[A-Z_]+", drawn)] == []


def test_ranks_run_between_a_start_and_a_fault_only() -> None:
    assert set(State) == {*WITH_RANKS, State.DECIDING, *BETWEEN, State.ENDED}
    for state, row in TABLE.items():
        for event, after in row.leads_to.items():
            if after in WITH_RANKS and state not in WITH_RANKS:
                assert event is Event.START
            if after in BETWEEN and state not in BETWEEN:
                assert event is Event.RESTART


@dataclass
class Run(StubSupervisor):
    """A coordinator of three members on three nodes, whose supervisors do at once what it asks."""

    step: float = 5.0
    has_tree: bool = True
    keeps_going: bool = True
    starts_again: str = ""
    errors: list[BaseException] = field(default_factory=list)

    def begin(self) -> None:
        on_error(self.errors.append)
        limits = Limits(checkpoint_s=3.0, shutdown_s=3.0, max_restarts=9, backoff_s=0.0)
        self.run = run_state(
            range(MEMBERS),
            limits,
            ExitFiles(""),
            self,
            Membership(range(MEMBERS), MEMBERS, 1, range(1, MEMBERS + 1)),
            keeps_going=self.keeps_going,
            starts_again=self.starts_again,
        )
        self.its = Coordinator(self.run)
        self.gone: set[int] = set()
        for member in range(MEMBERS):
            self.its.receive(messages.Joined(member, f"n{member}"))

    @property
    def there(self) -> list[int]:
        return [member for member in range(MEMBERS) if member not in self.gone]

    @property
    def number(self) -> int:
        return self.run.generation.number

    def broadcast(self, message: messages.Message) -> None:
        super().broadcast(message)
        match message:
            case messages.Regroup():
                for member in self.there:
                    self.its._post(messages.Ended(message.generation, member))
            case messages.Collect():
                for rank, (member, _) in enumerate(self.run.world.members):
                    if member in self.there:
                        self.its._post(messages.Report(self.number, replace(COMPUTING, rank=rank)))
            case messages.CollectStacks():
                for rank in message.ranks:
                    self.its._post(messages.Stack(self.number, rank, ""))
            case messages.Meet() if message.member in self.there:
                self.its._post(messages.Meeting(message.generation, {}))
            case messages.Start():
                self.step += 1

    def fail(self) -> None:
        record = ExitRecord(1, "n1", 1, "killed", 1.0)
        self.its.receive(messages.Failed(self.number, record, step=6, killed=True))

    def lose(self) -> None:
        self.gone.add(2)
        self.its.receive(messages.Lost(2, "n2", "its connection closed"))

    def come_back(self) -> None:
        self.gone.discard(2)
        self.its.receive(messages.Joined(2, "n2", idle=True))

    def be_late(self) -> None:
        self.its.receive(messages.Late(self.number, "step lasts too long"))

    def be_done(self) -> None:
        self.its.receive(messages.Done(self.number, 0, EXIT_DONE))

    def be_asked(self) -> None:
        self.its.receive(messages.StopRequest(15, 0, "n0"))

    def leave(self, other: str) -> None:
        raise AssertionError(f"nobody else claims a generation, but it leaves the run to {other}")

    async def claim(self, generation: int, world: str) -> None:
        """Nobody else wants it."""


HAPPENS: Mapping[str, Callable[[Run], None]] = {
    "fails": Run.fail,
    "is lost": Run.lose,
    "comes back": Run.come_back,
    "is late": Run.be_late,
    "is done": Run.be_done,
    "is asked": Run.be_asked,
}


async def settled(run: Run, order: tuple[str, ...], gap_s: float) -> None:
    """Lets it all happen, one after the other, and then waits longer than any limit."""
    run.begin()
    for what in order:
        HAPPENS[what](run)
        await asyncio.sleep(gap_s)
    await asyncio.sleep(20.0)


@pytest.mark.parametrize("launcher", ["keeps others", "ends all", "starts all again"])
@pytest.mark.parametrize("gap_s", [0.1, 1.0])
def test_whatever_happens_in_any_order_the_run_goes_on_or_ends_once(gap_s: float, launcher: str) -> None:
    for order in itertools.permutations(HAPPENS, 3):
        run = Run(
            keeps_going=launcher == "keeps others",
            starts_again="lost" if launcher == "starts all again" else "",
        )
        clock.run(settled(run, order, gap_s), clock=clock.Clock(grace_s=0.0))
        assert run.errors == [], f"{order}: an event that the table does not have"
        ended = run.its.state is State.ENDED
        assert len(run.records) == ended, f"{order}: it ends in {run.its.state}, with {run.records}"
        assert ended or run.its.state in WITH_RANKS, f"{order}: it stands for ever in {run.its.state}"
        kinds = [type(message) for message in run.said]
        starts = [message.generation for message in run.said if isinstance(message, messages.Start)]
        assert starts == sorted(set(starts)), f"{order}: a generation starts twice"
        if messages.Stop(to_grow=False) in run.said:
            stop = run.said.index(messages.Stop(to_grow=False))
            assert messages.Start not in kinds[stop:], f"{order}: ranks start though the run is asked to stop"
            assert ended, f"{order}: nobody has left in time"
        assert not ended or run.records[0].exit_code in (
            EXIT_FAILED,
            EXIT_TIMED_OUT,
            EXIT_PREEMPTED,
            EXIT_START_AGAIN,
        ), order


async def test_a_run_that_has_ended_is_not_taken_over() -> None:
    run = Run(begun=False)
    run.begin()
    run.be_asked()
    assert run.its.state is State.ENDED
    await run.its.take_over(messages.Roster(1, "0 2 n0", "", ((2, ("h", 1)),)), 1, 1, ())
    await asyncio.sleep(1.0)
    assert (run.errors, [record.exit_code for record in run.records]) == ([], [EXIT_PREEMPTED])
