"""Decisions that rank 0's supervisor makes from messages.

The subjects: the first cause, exit codes, requests to stop, diagnoses.
"""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.stub_supervisor import StubSupervisor, run_state
from tests.unit.test_diagnosis import COMPUTING, WAITING
from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord
from trainer.supervise.coordinate.coordinator import Coordinator
from trainer.supervise.limits import Limits
from trainer.supervise.messages import (
    Collect,
    CollectStacks,
    Cut,
    Done,
    Failed,
    Joined,
    Late,
    Lost,
    Message,
    Report,
    Stack,
    Stop,
    StopRequest,
)

LIMITS = Limits(checkpoint_s=0.3, shutdown_s=0.3)
STOP = StopRequest(signal=15, rank=0, node="n0")


def joined(ranks: int = 2, limits: Limits = LIMITS) -> tuple[Coordinator, StubSupervisor]:
    """A coordinator that all supervisors have joined, and what it does."""
    actions = StubSupervisor()
    coordinator = Coordinator(run_state(range(ranks), limits, ExitFiles(limits.run_folder), actions))
    for rank in range(ranks):
        coordinator.receive(Joined(member=rank, node=f"n{rank}"))
    return coordinator, actions


async def end(actions: StubSupervisor) -> ExitRecord:
    """The only record that ends the run."""
    while not actions.records:
        await asyncio.sleep(0.01)
    (record,) = actions.records
    return record


def failed(rank: int, code: int, reason: str, *, waiting: bool, at: float, killed: bool = False) -> Message:
    record = ExitRecord(rank, f"n{rank}", code, reason, at)
    return Failed(waiting=waiting, record=record, killed=killed, generation=1)


@pytest.mark.parametrize(
    ("told", "rank", "code", "said"),
    [
        ([Done(rank=rank, code=0, generation=1) for rank in (0, 1)], 0, 0, ""),
        (
            [
                failed(0, 1, "connection reset", waiting=True, at=1.0),
                Lost(member=0, node="n0", reason="its connection closed"),
                failed(1, 2, "no such file", waiting=False, at=2.0),
            ],
            1,
            2,
            "no such file",
        ),
        (
            [
                failed(0, 1, "later", waiting=False, at=2.0),
                failed(1, 7, "earlier", waiting=False, at=1.0),
            ],
            1,
            7,
            "earlier",
        ),
        (
            [
                failed(0, 1, "connection reset", waiting=False, at=1.0),
                failed(1, 1, "killed", waiting=False, at=1.0, killed=True),
            ],
            1,
            1,
            "killed",
        ),
        ([Lost(1, "n1", "its connection closed")], 1, 1, "its supervisor is gone: its connection closed"),
        (
            [Cut(member=0, node="n0", other="rank 1 on n1")],
            0,
            1,
            "its node has lost the network: it can no longer reach rank 1 on n1",
        ),
        ([Done(rank=0, code=0, generation=1)], 0, 124, "timeouts.shutdown_s"),
        ([Done(rank=1, code=75, generation=1)], 1, 75, ""),
        (
            [Late(what="init lasts too long", generation=1)],
            0,
            124,
            "rank 0 on n0: its supervisor does not answer",
        ),
        ([STOP], 0, 124, "the run was asked to stop and had not ended after 0.6 s"),
        (
            [Done(1, rank, 75, "asked to stop during an evaluation") for rank in (0, 1)],
            0,
            75,
            "asked to stop during an evaluation",
        ),
        ([StopRequest(2, 0, "n0", again=again) for again in (False, True)], 0, 130, ""),
    ],
    ids=[
        "all are done",
        "a failure outside of a collective comes before one inside, whatever arrives first",
        "the earlier of two similar failures counts",
        "a killed rank comes before what failed because of it",
        "a supervisor that is gone",
        "a node that reaches nobody names itself",
        "a rank that stays behind when others are done is timed out",
        "a rank that stays behind the others of a preempted run",
        "no supervisor answers",
        "ranks ignore a request to stop",
        "the reason of a stopped run is the rank's own",
        "a signal that a user repeats ends the run at once",
    ],
)
async def test_what_the_supervisors_tell_decides_how_the_run_ends(
    told: list[Message], rank: int, code: int, said: str
) -> None:
    coordinator, actions = joined()
    for message in told:
        coordinator.receive(message)
    record = await end(actions)
    assert (record.rank, record.exit_code) == (rank, code)
    assert said in f"{record.reason}\n{record.details}"


async def test_a_rank_that_joins_after_a_stop_request_receives_it() -> None:
    coordinator, actions = joined()
    coordinator.receive(STOP)
    coordinator.receive(Joined(member=1, node="n1"))
    assert actions.said.count(Stop()) == 2
    coordinator.receive(Done(rank=0, code=75, generation=1))
    coordinator.receive(Done(rank=1, code=75, generation=1))
    assert (await end(actions)).exit_code == 75


async def test_late_rank_makes_a_diagnosis_of_all(tmp_path: Path) -> None:
    coordinator, actions = joined(3, replace(LIMITS, run_folder=str(tmp_path)))
    coordinator.receive(Late(what="step, step 7, lasts too long", generation=1))
    while Collect() not in actions.said:
        await asyncio.sleep(0.01)
    for report in (WAITING, COMPUTING, replace(WAITING, rank=2)):
        coordinator.receive(Report(report=report, generation=1))
    while actions.said[-1] != CollectStacks(ranks=(1, 0)):  # the late one, and one that waits
        await asyncio.sleep(0.01)
    for rank in (1, 0):
        coordinator.receive(Stack(rank=rank, stack=f"stack of {rank}", generation=1))
    record = await end(actions)
    assert (record.rank, record.node, record.exit_code) == (1, "n2", 124)
    assert "stack of 1" in record.details
    found = json.loads((tmp_path / "diagnosis.json").read_text())
    assert (found["exit_code"], found["late"], len(found["ranks"])) == (124, [1], 3)
    assert json.loads((tmp_path / "exit.json").read_text())["exit_code"] == 124


@pytest.fixture
def time_to_save(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Limits with time for a checkpoint, where signals within 0.2 s are one."""
    monkeypatch.setattr("trainer.supervise.network.link.REPEAT_S", 0.2)
    return replace(LIMITS, checkpoint_s=60.0)


async def test_repeated_signal_is_one_request_and_a_later_one_leaves_at_once(time_to_save: Limits) -> None:
    coordinator, actions = joined(limits=time_to_save)
    coordinator.receive(STOP)
    coordinator.receive(STOP)
    assert actions.said.count(Stop()) == 1
    await asyncio.sleep(0.3)
    coordinator.receive(STOP)
    assert (await end(actions)).exit_code == 143


async def test_a_node_that_is_drained_while_ranks_save_for_another_one_does_not_end_them(
    time_to_save: Limits,
) -> None:
    coordinator, actions = joined(limits=time_to_save)
    for request in (STOP, StopRequest(15, 1, "n1"), replace(STOP, outside=True)):
        coordinator.receive(request)
        await asyncio.sleep(0.3)
    for rank in (0, 1):
        coordinator.receive(Done(rank=rank, code=75, generation=1))
    assert ((await end(actions)).exit_code, actions.said.count(Stop())) == (75, 1)


@pytest.mark.parametrize(("signalled", "code"), [(True, 130), (False, 75)])
async def test_a_signal_before_a_supervisor_joined_is_its_first(
    signalled: bool, code: int, time_to_save: Limits
) -> None:
    """A request of which it only knows, from a lost coordinator, is not."""
    coordinator, actions = joined(limits=time_to_save)
    for member in (0, 1):
        coordinator.receive(Joined(member, f"n{member}", asked=True, signalled=signalled))
    await asyncio.sleep(0.3)
    coordinator.receive(StopRequest(2, 1, "n1"))
    for rank in (0, 1):
        coordinator.receive(Done(rank=rank, code=75, generation=1))
    assert (await end(actions)).exit_code == code


async def test_stop_before_the_first_step_is_done_waits_for_no_rank_once_all_can_hear_of_it() -> None:
    actions = StubSupervisor(begun=False)
    coordinator = Coordinator(run_state(range(2), LIMITS, ExitFiles(""), actions))
    coordinator.receive(Joined(member=0, node="n0"))
    coordinator.receive(StopRequest(signal=2, rank=0, node="n0"))
    await asyncio.sleep(0.1)
    assert not actions.records, "rank 1's supervisor has not come yet"
    coordinator.receive(Joined(member=1, node="n1"))
    record = await end(actions)
    assert record.exit_code == 75
    assert "before there was anything to save" in record.reason
