"""Decisions of the checkpoint policy: when to save, when to evaluate, which checkpoint is the best."""

import math
from dataclasses import astuple
from typing import Any

from tests.support.jobs import tiny_job
from trainer.config.batch_plan import Schedule
from trainer.train.checkpoint_policy import CheckpointPolicy

STEPS = 10
TOP1 = "zero_shot_top1"


class Clock:
    """Seconds that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def policy_of(
    steps_done: int = 0, best: float = -math.inf, clock: Clock | None = None, **sections: dict[str, Any]
) -> CheckpointPolicy:
    """The policy of a run of ten steps, four to an epoch."""
    sections["eval"] = {"zero_shot": ("val",), **sections.get("eval", {})}
    job = tiny_job(**sections)  # type: ignore[arg-type]
    return CheckpointPolicy(job.checkpoint, job.eval, Schedule(4, STEPS), steps_done, best, clock or Clock())


def decided(policy: CheckpointPolicy) -> tuple[list[int], list[int]]:
    """The steps that are saved and those that are evaluated, if nobody asks for anything."""
    saves, evaluations = [], []
    for step in range(policy.saved_step + 1, STEPS + 1):
        due = policy.after_step(step, stop=False, save=False)
        if due.save:
            policy.saved(step)
            saves.append(step)
        if due.evaluate:
            evaluations.append(step)
    return saves, evaluations


def test_steps_are_saved_and_evaluated_as_often_as_the_job_says_and_at_the_end() -> None:
    assert decided(policy_of()) == ([STEPS], [STEPS])
    policy = policy_of(checkpoint={"every_steps": 3}, eval={"every_steps": 5})
    policy.after_evaluation(0, {TOP1: 0.1}, stop=False)
    assert decided(policy) == ([3, 6, 9, 10], [5, 10])
    assert decided(policy_of(5, eval={"every_epochs": 1}))[1] == [8, 10], "epochs of the whole run"


def test_a_step_is_saved_before_an_evaluation_that_may_end_the_run() -> None:
    """The first of a start may, in ways that cannot be caught, and with "stop" each may."""
    for on_failure, later in (("continue", False), ("stop", True)):
        policy = policy_of(eval={"every_steps": 2, "on_failure": on_failure})
        assert astuple(policy.after_step(2, stop=False, save=False)) == (True, True)
        policy.saved(2)
        policy.after_evaluation(2, {}, stop=False)
        assert policy.after_step(4, stop=False, save=False).save, "no evaluation has ended well yet"
        policy.after_evaluation(4, {TOP1: 0.1}, stop=False)
        assert astuple(policy.after_step(6, stop=False, save=False)) == (later, True)
    nothing = policy_of(eval={"every_steps": 2, "zero_shot": ()})
    assert not nothing.after_step(2, stop=False, save=False).save


def test_a_request_saves_a_step_once_and_a_stop_leaves_out_its_evaluation() -> None:
    assert astuple(policy_of(STEPS).after_step(STEPS, stop=False, save=False)) == (False, True)
    policy = policy_of(eval={"every_steps": 2})
    assert astuple(policy.after_step(2, stop=True, save=False)) == (True, False)
    assert astuple(policy.after_step(2, stop=False, save=True)) == (True, True)
    policy.saved(3)
    assert astuple(policy.after_step(3, stop=True, save=True)) == (False, False)


def test_a_better_value_saves_a_step_that_was_not_due_and_nan_is_never_better() -> None:
    policy = policy_of(best=0.3, checkpoint={"best": TOP1})
    for value in (0.3, math.nan):
        assert astuple(policy.after_evaluation(2, {TOP1: value}, stop=False)) == (False, False, None)
    assert astuple(policy.after_evaluation(4, {TOP1: 0.4}, stop=False)) == (True, False, (TOP1, 0.4))
    policy.saved(6)
    assert astuple(policy.after_evaluation(6, {TOP1: 0.4}, stop=False)) == (False, True, None)


def test_an_evaluation_that_a_stop_ended_saves_its_step_once() -> None:
    policy = policy_of(checkpoint={"best": TOP1})
    assert astuple(policy.after_evaluation(2, {}, stop=True)) == (True, False, None)
    policy.saved(2)
    assert astuple(policy.after_evaluation(2, {}, stop=True)) == (False, False, None)


def test_a_timed_checkpoint_is_asked_for_once_and_again_after_the_same_time() -> None:
    clock = Clock()
    policy = policy_of(clock=clock, checkpoint={"every_minutes": 2})
    asked = []
    for _ in range(5):
        clock.now += 61.0
        asked.append(policy.pop_overdue())
    assert asked == [False, True, False, True, False]
    policy.saved(1)
    clock.now += 119.0
    assert not policy.pop_overdue()
    clock.now += 2.0
    assert policy.pop_overdue()
