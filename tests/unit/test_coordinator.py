"""Decisions that rank 0's supervisor makes from messages.

The subjects: the first cause, exit codes, requests to stop, diagnoses.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import clock
from tests.support.stub_actions import StubActions
from tests.unit.test_diagnosis import COMPUTING, WAITING
from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord
from trainer.supervise.coordinate.coordinator import Coordinator
from trainer.supervise.coordinate.run_state import RunState
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


def decided(
    send: Callable[[Coordinator, list[Message]], Any], ranks: int = 2, limits: Limits = LIMITS
) -> tuple[ExitRecord, list[Message]]:
    """The record that ends the run, and what it broadcast, after `send` has told it something."""
    actions = StubActions()
    broadcast, records = actions.said, actions.records

    async def story() -> None:
        coordinator = Coordinator(RunState(range(ranks), limits, ExitFiles(limits.run_folder), actions))
        for rank in range(ranks):
            coordinator.receive(Joined(member=rank, node=f"n{rank}"))
        again = send(coordinator, broadcast)
        if again is not None:
            await again
        while not records:
            await asyncio.sleep(0.01)

    clock.run(story())
    assert len(records) == 1
    return records[0], broadcast


def failed(rank: int, code: int, reason: str, *, waiting: bool, at: float) -> Message:
    return Failed(waiting=waiting, record=ExitRecord(rank, f"n{rank}", code, reason, at), generation=1)


def test_all_done_is_done() -> None:
    def send(coordinator: Coordinator, broadcast: list[Message]) -> None:
        coordinator.receive(Done(rank=0, code=0, generation=1))
        coordinator.receive(Done(rank=1, code=0, generation=1))

    assert decided(send)[0].exit_code == 0


def test_failure_outside_of_a_collective_comes_before_one_inside_whatever_arrives_first() -> None:
    def send(coordinator: Coordinator, broadcast: list[Message]) -> None:
        coordinator.receive(failed(0, 1, "connection reset", waiting=True, at=1.0))
        coordinator.receive(Lost(member=0, node="n0", reason="its connection closed"))
        coordinator.receive(failed(1, 2, "no such file", waiting=False, at=2.0))

    record, _ = decided(send)
    assert (record.rank, record.exit_code, record.reason) == (1, 2, "no such file")


def test_of_two_similar_failures_the_earlier_one_counts() -> None:
    def send(coordinator: Coordinator, broadcast: list[Message]) -> None:
        coordinator.receive(failed(0, 1, "later", waiting=False, at=2.0))
        coordinator.receive(failed(1, 7, "earlier", waiting=False, at=1.0))

    assert decided(send)[0].reason == "earlier"


def test_supervisor_that_is_gone_fails_the_run() -> None:
    record, _ = decided(
        lambda coordinator, broadcast: coordinator.receive(
            Lost(member=1, node="n1", reason="its connection closed")
        )
    )
    assert (record.rank, record.exit_code) == (1, 1)
    assert "its supervisor is gone: its connection closed" in record.reason


def test_node_that_reaches_nobody_names_itself() -> None:
    record, _ = decided(
        lambda coordinator, broadcast: coordinator.receive(Cut(member=0, node="n0", other="rank 1 on n1"))
    )
    assert (record.rank, record.node, record.exit_code) == (0, "n0", 1)
    assert record.reason == "its node has lost the network: it can no longer reach rank 1 on n1"


def test_rank_that_stays_behind_when_others_are_done_is_timed_out() -> None:
    record, broadcast = decided(
        lambda coordinator, broadcast: coordinator.receive(Done(rank=0, code=0, generation=1))
    )
    assert record.exit_code == 124
    assert "timeouts.shutdown_s" in record.reason
    assert Collect() in broadcast


def test_preempted_run_ends_with_75_even_if_a_rank_stays_behind() -> None:
    assert (
        decided(lambda coordinator, broadcast: coordinator.receive(Done(rank=1, code=75, generation=1)))[
            0
        ].exit_code
        == 75
    )


def test_late_rank_makes_a_diagnosis_of_all(tmp_path: Path) -> None:
    async def answer(coordinator: Coordinator, broadcast: list[Message]) -> None:
        while Collect() not in broadcast:
            await asyncio.sleep(0.01)
        for found in (WAITING, COMPUTING, replace(WAITING, rank=2)):
            coordinator.receive(Report(report=found, generation=1))
        while not isinstance(broadcast[-1], CollectStacks):
            await asyncio.sleep(0.01)
        for rank in broadcast[-1].ranks:
            coordinator.receive(Stack(rank=rank, stack=f"stack of {rank}", generation=1))

    def send(coordinator: Coordinator, broadcast: list[Message]) -> Any:
        coordinator.receive(Late(what="step, step 7, lasts too long", generation=1))
        return answer(coordinator, broadcast)

    record, broadcast = decided(send, 3, replace(LIMITS, run_folder=str(tmp_path)))
    assert (record.rank, record.node, record.exit_code) == (1, "n2", 124)
    assert "stack of 1" in record.details
    assert broadcast[-1] == CollectStacks(ranks=(1, 0)), "the late one, and one that waits"
    found = json.loads((tmp_path / "diagnosis.json").read_text())
    assert (found["exit_code"], found["late"], len(found["ranks"])) == (124, [1], 3)
    assert json.loads((tmp_path / "exit.json").read_text())["exit_code"] == 124


def test_the_run_ends_even_if_no_supervisor_answers(monkeypatch: Any) -> None:
    monkeypatch.setattr("trainer.supervise.coordinate.report_collection.ANSWER_S", 0.2)
    record, _ = decided(
        lambda coordinator, broadcast: coordinator.receive(Late(what="init lasts too long", generation=1))
    )
    assert record.exit_code == 124
    assert "rank 0 on n0: its supervisor does not answer" in record.details


def test_repeated_signal_is_one_request_and_a_later_one_leaves_at_once(monkeypatch: Any) -> None:
    monkeypatch.setattr("trainer.supervise.network.link.REPEAT_S", 0.2)
    stop = StopRequest(signal=15, rank=0, node="n0")

    def send(coordinator: Coordinator, broadcast: list[Message]) -> Any:
        coordinator.receive(stop)
        coordinator.receive(stop)
        assert broadcast.count(Stop()) == 1

        async def again() -> None:
            await asyncio.sleep(0.3)
            coordinator.receive(stop)

        return again()

    record, _ = decided(send, limits=replace(LIMITS, checkpoint_s=60.0))
    assert record.exit_code == 143


def test_a_node_that_is_drained_while_ranks_save_for_another_one_does_not_end_them(monkeypatch: Any) -> None:
    monkeypatch.setattr("trainer.supervise.network.link.REPEAT_S", 0.2)
    requests = [StopRequest(15, 0, "n0"), StopRequest(15, 1, "n1"), StopRequest(15, 0, "n0", outside=True)]

    def send(coordinator: Coordinator, broadcast: list[Message]) -> Any:
        async def one_after_the_other() -> None:
            for request in requests:
                coordinator.receive(request)
                await asyncio.sleep(0.3)
            for rank in (0, 1):
                coordinator.receive(Done(rank=rank, code=75, generation=1))

        return one_after_the_other()

    record, broadcast = decided(send, limits=replace(LIMITS, checkpoint_s=60.0))
    assert (record.exit_code, broadcast.count(Stop())) == (75, 1)


@pytest.mark.parametrize(("signalled", "code"), [(True, 130), (False, 75)])
def test_a_signal_before_a_supervisor_joined_is_its_first(
    signalled: bool, code: int, monkeypatch: Any
) -> None:
    """A request of which it only knows, from a lost coordinator, is not."""
    monkeypatch.setattr("trainer.supervise.network.link.REPEAT_S", 0.2)

    def send(coordinator: Coordinator, broadcast: list[Message]) -> Any:
        async def joins_and_asks() -> None:
            for member in (0, 1):
                coordinator.receive(Joined(member, f"n{member}", asked=True, signalled=signalled))
            await asyncio.sleep(0.3)
            coordinator.receive(StopRequest(2, 1, "n1"))
            for rank in (0, 1):
                coordinator.receive(Done(rank=rank, code=75, generation=1))

        return joins_and_asks()

    assert decided(send, limits=replace(LIMITS, checkpoint_s=60.0))[0].exit_code == code


def test_a_stop_request_that_ranks_ignore_times_out() -> None:
    record, _ = decided(
        lambda coordinator, broadcast: coordinator.receive(StopRequest(signal=15, rank=0, node="n0"))
    )
    assert record.exit_code == 124
    assert "the run was asked to stop and had not ended after 0.6 s" in record.reason


def test_the_reason_of_a_stopped_run_is_the_rank_s_own() -> None:
    def send(coordinator: Coordinator, broadcast: list[Message]) -> None:
        for rank in (0, 1):
            coordinator.receive(
                Done(rank=rank, code=75, reason="asked to stop during an evaluation", generation=1)
            )

    assert decided(send)[0].reason == "asked to stop during an evaluation"


def test_a_rank_that_joins_after_a_stop_request_receives_it() -> None:
    def send(coordinator: Coordinator, broadcast: list[Message]) -> None:
        coordinator.receive(StopRequest(signal=15, rank=0, node="n0"))
        coordinator.receive(Joined(member=1, node="n1"))
        assert broadcast.count(Stop()) == 2
        coordinator.receive(Done(rank=0, code=75, generation=1))
        coordinator.receive(Done(rank=1, code=75, generation=1))

    assert decided(send)[0].exit_code == 75


def test_a_signal_that_a_user_repeats_ends_the_run_at_once() -> None:
    def send(coordinator: Coordinator, broadcast: list[Message]) -> None:
        for again in (False, True):
            coordinator.receive(StopRequest(signal=2, rank=0, node="n0", again=again))

    assert decided(send, limits=replace(LIMITS, checkpoint_s=60.0))[0].exit_code == 130


def test_stop_before_the_first_step_is_done_waits_for_no_rank_once_all_can_hear_of_it() -> None:
    actions = StubActions(begun=False)
    records = actions.records

    async def story() -> None:
        coordinator = Coordinator(RunState(range(2), LIMITS, ExitFiles(""), actions))
        coordinator.receive(Joined(member=0, node="n0"))
        coordinator.receive(StopRequest(signal=2, rank=0, node="n0"))
        await asyncio.sleep(0.1)
        assert not records, "rank 1's supervisor has not come yet"
        coordinator.receive(Joined(member=1, node="n1"))
        while not records:
            await asyncio.sleep(0.01)

    clock.run(story())
    assert records[0].exit_code == 75
    assert "before there was anything to save" in records[0].reason
