"""Which faults a run survives, and after which wait: the policy alone, without clock, process and file."""

from dataclasses import replace

import pytest

from trainer.supervise.restarts import Restart
from trainer.world.restart_policy import Fault, GiveUp, GoOn, RestartPolicy

FAULT = Fault(1, "n1", 812, "killed by SIGKILL in step, step 812")


def policy(max_restarts: int = 3, same_fault_limit: int = 2, backoff_s: float = 4.0) -> RestartPolicy:
    return RestartPolicy(max_restarts, same_fault_limit, backoff_s, jitter=lambda: 0.0)


def at(step: int) -> Fault:
    return replace(FAULT, step=step)


def test_restarts_are_counted_until_they_are_used_up() -> None:
    its = policy()
    assert [its.decide(at(step), 800) for step in (1, 2, 3)] == [GoOn(1, 0.0), GoOn(2, 4.0), GoOn(3, 8.0)]
    end = its.decide(at(4), 800)
    assert isinstance(end, GiveUp)
    assert (
        end.reason
        == "3 restarts without a new checkpoint in between are all that recovery.max_restarts allows"
    )


def test_a_newer_checkpoint_begins_the_count_anew_and_ends_the_wait() -> None:
    its = policy(max_restarts=1)
    assert its.decide(at(801), 800) == GoOn(1, 0.0)
    assert its.decide(at(901), 900) == GoOn(1, 0.0)
    assert isinstance(its.decide(at(902), 900), GiveUp), "the checkpoint is no newer"


@pytest.mark.parametrize("limit", [2, 3])
def test_same_fault_in_a_row_looks_like_a_bug(limit: int) -> None:
    its = policy(max_restarts=10, same_fault_limit=limit)
    assert all(isinstance(its.decide(FAULT, 0), GoOn) for _ in range(limit - 1))
    end = its.decide(FAULT, 0)
    assert isinstance(end, GiveUp)
    assert f"{limit} times in a row looks like a bug" in end.reason


@pytest.mark.parametrize(
    "other", [replace(FAULT, rank=0), replace(FAULT, step=813), replace(FAULT, cause="ValueError: no")]
)
def test_another_fault_in_between_begins_that_count_anew(other: Fault) -> None:
    its = policy(max_restarts=10)
    assert all(isinstance(its.decide(fault, 0), GoOn) for fault in (FAULT, other, FAULT, other))


def test_causes_may_differ_in_their_numbers() -> None:
    refused = "RuntimeError: connection to [10.0.0.{}]:{} refused, handle 0x7f{}"
    one, other = (
        replace(FAULT, cause=refused.format(*numbers)) for numbers in ((1, 22, "ab"), (2, 4711, 99))
    )
    assert one.is_like(other)
    assert not one.is_like(replace(other, cause="RuntimeError: closed"))
    assert one.is_like(replace(other, node="n7")), "rank 1 may be elsewhere by then"


def test_wait_doubles_up_to_eight_times_and_at_most_half_of_it_is_left_out() -> None:
    its = policy(max_restarts=10)
    waits = [its.decide(at(step), 0) for step in range(1, 8)]
    assert [wait.wait_s for wait in waits if isinstance(wait, GoOn)] == [0, 4, 8, 16, 32, 32, 32]
    jittered = RestartPolicy(3, 2, 4.0, jitter=lambda: 0.999)
    jittered.decide(at(1), 0)
    answer = jittered.decide(at(2), 0)
    assert isinstance(answer, GoOn)
    assert 2.0 < answer.wait_s < 2.1


def test_new_step_ends_the_waits_and_not_the_count() -> None:
    its = policy(max_restarts=4)
    new = [False, False, True, False]
    waits = [its.decide(at(step), 0, new_step=new_step) for step, new_step in enumerate(new, 1)]
    assert waits == [GoOn(1, 0.0), GoOn(2, 4.0), GoOn(3, 0.0), GoOn(4, 4.0)]
    assert isinstance(its.decide(at(5), 0, new_step=True), GiveUp)


def test_summary_is_the_restart_without_its_details() -> None:
    restart = Restart(2, "timed out", 1, "n1", 812, 800, 7.5, "a long stack")
    assert {**restart.summary(), "details": "a long stack"} == restart.to_json()
    assert "details" not in restart.summary()
