"""Which faults a run survives, and after which wait; what is recorded of a restart."""

import json
from dataclasses import replace
from typing import Any

import pytest

from trainer.supervise import restarts
from trainer.supervise.coordinate import membership
from trainer.world.restart_policy import Fault, GiveUp, GoOn, RestartPolicy

FAULT = Fault(1, "n1", 812, "killed by SIGKILL in step, step 812")


def policy(max_restarts: int = 3, same_fault_limit: int = 2, jitter: float = 0.0) -> RestartPolicy:
    return RestartPolicy(max_restarts, same_fault_limit, 4.0, jitter=lambda: jitter)


def at(step: int) -> Fault:
    return replace(FAULT, step=step)


def test_restarts_are_counted_until_they_are_used_up() -> None:
    its = policy()
    assert [its.decide(at(step), 800) for step in (1, 2, 3)] == [GoOn(1, 0.0), GoOn(2, 4.0), GoOn(3, 8.0)]
    end = its.decide(at(4), 800)
    assert isinstance(end, GiveUp)
    assert end.reason.startswith("3 restarts without a new checkpoint in between are all that recovery.max_")


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


HUNG = (
    "timed out: step, step 7, lasts longer than {} s, learned from the last {} (99 % took at most {} s, "
    "99.9 % 0.7 s), under timeouts.step_s = 300 s (noticed on rank 0)"
)


@pytest.mark.parametrize(
    ("text", "one", "other"),
    [
        ("RuntimeError: connection to [10.0.0.{}]:{} refused, handle 0x7f{}", (1, 22, "ab"), (2, 4711, 99)),
        (HUNG, ("12", "150", "0.7"), ("14", "1,000", "12.7")),
    ],
    ids=["addresses", "a hang with another learned limit"],
)
def test_causes_may_differ_in_their_numbers(text: str, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    first, second = (replace(FAULT, cause=text.format(*numbers)) for numbers in (one, other))
    assert first.is_like(second)
    assert not first.is_like(replace(second, cause="RuntimeError: closed"))
    assert first.is_like(replace(second, node="n7")), "rank 1 may be elsewhere by then"


def test_wait_doubles_up_to_eight_times_and_at_most_half_of_it_is_left_out() -> None:
    its = policy(max_restarts=10)
    waits = [its.decide(at(step), 0) for step in range(1, 8)]
    assert [wait.wait_s for wait in waits if isinstance(wait, GoOn)] == [0, 4, 8, 16, 32, 32, 32]
    jittered = policy(jitter=0.999)
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


# What is recorded.


def test_a_restart_is_read_back_and_its_summary_lacks_the_details() -> None:
    row = membership.Exclusion("n1", "failed", "it has failed 2 times", (), 100.0)
    restart = restarts.Restart(2, "timed out", 1, "n1", 812, 800, 7.5, "a long stack", left_out=(row,))
    table = json.loads(json.dumps(restart.to_json()))
    assert restarts.restart_from_json(table) == restart
    assert {**restart.summary(), "details": "a long stack"} == restart.to_json()
    assert "details" not in restart.summary()


def test_each_part_lasts_from_the_end_of_the_one_before() -> None:
    clock = restarts.RestartClock(100.0)
    clock.end_part("detect", 100.4)
    clock.end_part("end", 100.5)
    moments = {"running": 103.5, "connected": 104.0, "restored": 106.0, "stepped": 106.25}
    clock.end_ranks_parts(moments)
    clock.end_part("redone", 107.0)
    assert clock.parts == {
        "detect": 0.4,
        "end": 0.1,
        "start": 3.0,
        "connect": 0.5,
        "restore": 2.0,
        "first_step": 0.25,
        "redone": 0.75,
    }
    late = restarts.RestartClock(100.0)
    late.end_part("detect", 101.0)
    late.end_ranks_parts({"running": 99.0, "connected": 101.5})
    assert late.parts == {"detect": 1.0, "start": 0.0, "connect": 0.5}


def test_status_names_the_parts_that_took_time() -> None:
    parts = {"first_step": 0.26, "detect": 0.41, "end": 0.04, "unknown": 3.0, "start": None}
    assert restarts.parts_text(parts) == "deciding 0.4 s, the first step 0.3 s"
    assert restarts.parts_text({}) == restarts.parts_text(None) == restarts.parts_text([1]) == ""
