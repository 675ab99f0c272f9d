"""Decisions of the checkpoint policy: when to save, when to evaluate, which checkpoint is the best."""

import math
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.config.batch_plan import Schedule
from trainer.train.checkpoint_policy import AfterEvaluation, AfterStep, CheckpointPolicy, is_due

STEPS = 10
TOP1 = "zero_shot_top1"
NOTHING = AfterStep(save=False, evaluate=False)


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


def test_the_last_step_is_saved_and_evaluated_without_being_asked_for() -> None:
    assert decided(policy_of()) == ([STEPS], [STEPS])


def test_steps_are_saved_and_evaluated_as_often_as_the_job_says() -> None:
    policy = policy_of(checkpoint={"every_steps": 3}, eval={"every_steps": 5})
    policy.after_evaluation(0, {TOP1: 0.1}, stop=False)
    assert decided(policy) == ([3, 6, 9, 10], [5, 10])


def test_a_step_is_saved_before_an_evaluation_that_may_end_the_run() -> None:
    """The first of a start may, in ways that cannot be caught, and with "stop" each may."""
    for on_failure, later in (("continue", False), ("stop", True)):
        policy = policy_of(eval={"every_steps": 2, "on_failure": on_failure})
        assert policy.after_step(2, stop=False, save=False) == AfterStep(save=True, evaluate=True)
        policy.saved(2)
        policy.after_evaluation(2, {}, stop=False)
        assert policy.after_step(4, stop=False, save=False).save, "no evaluation has ended well yet"
        policy.after_evaluation(4, {TOP1: 0.1}, stop=False)
        assert policy.after_step(6, stop=False, save=False) == AfterStep(save=later, evaluate=True)
    nothing = policy_of(eval={"every_steps": 2, "zero_shot": ()})
    assert not nothing.after_step(2, stop=False, save=False).save


def test_an_evaluation_at_an_epochs_end_counts_epochs_of_the_whole_run() -> None:
    assert decided(policy_of(eval={"every_epochs": 2}))[1] == [8, 10]
    assert decided(policy_of(5, eval={"every_epochs": 1}))[1] == [8, 10]


@pytest.mark.parametrize("ask", ["stop", "save"])
def test_a_request_saves_the_step_at_which_it_is_known(ask: str) -> None:
    policy = policy_of()
    due = policy.after_step(2, stop=ask == "stop", save=ask == "save")
    assert due == AfterStep(save=True, evaluate=False)


def test_a_stop_leaves_out_an_evaluation_that_is_due_and_a_save_does_not() -> None:
    policy = policy_of(eval={"every_steps": 2})
    assert policy.after_step(2, stop=True, save=False) == AfterStep(save=True, evaluate=False)
    assert policy.after_step(2, stop=False, save=True) == AfterStep(save=True, evaluate=True)


def test_a_step_that_is_saved_is_not_saved_again() -> None:
    """A start at the last step only evaluates; a request for a step that is saved already changes nothing."""
    assert policy_of(STEPS).after_step(STEPS, stop=False, save=False) == AfterStep(save=False, evaluate=True)
    policy = policy_of()
    policy.saved(3)
    assert policy.after_step(3, stop=True, save=True) == NOTHING


def test_a_better_value_saves_a_step_that_was_not_due() -> None:
    policy = policy_of(best=0.3, checkpoint={"best": TOP1})
    assert policy.after_evaluation(2, {TOP1: 0.3}, stop=False) == AfterEvaluation(False, False, None)
    assert policy.after_evaluation(4, {TOP1: 0.4}, stop=False) == AfterEvaluation(True, False, (TOP1, 0.4))
    assert policy.after_evaluation(6, {TOP1: 0.4}, stop=False) == AfterEvaluation(False, False, None)


def test_a_step_that_is_saved_gets_its_metrics_whether_it_is_the_best_or_not() -> None:
    policy = policy_of(checkpoint={"best": TOP1})
    for step, value, best in ((2, 0.4, (TOP1, 0.4)), (4, 0.1, None)):
        policy.saved(step)
        then = policy.after_evaluation(step, {TOP1: value}, stop=False)
        assert then == AfterEvaluation(save=False, record=True, best=best)


def test_a_nan_value_is_never_the_best() -> None:
    policy = policy_of(checkpoint={"best": TOP1})
    assert policy.after_evaluation(2, {TOP1: math.nan}, stop=False).best is None
    assert policy.after_evaluation(4, {TOP1: 0.1}, stop=False).best == (TOP1, 0.1)


def test_an_evaluation_that_a_stop_ended_saves_its_step_once() -> None:
    policy = policy_of(checkpoint={"best": TOP1})
    assert policy.after_evaluation(2, {}, stop=True) == AfterEvaluation(save=True, record=False, best=None)
    policy.saved(2)
    assert policy.after_evaluation(2, {}, stop=True) == AfterEvaluation(save=False, record=False, best=None)


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


def test_a_job_without_timed_checkpoints_is_never_overdue() -> None:
    clock = Clock()
    policy = policy_of(clock=clock, checkpoint={"every_minutes": None})
    clock.now += 1e9
    assert not policy.pop_overdue()


@pytest.mark.parametrize(
    ("step", "every", "due"), [(4, 2, True), (5, 2, False), (5, None, False), (5, 0, False), (10, 4, True)]
)
def test_a_step_is_due_at_each_multiple_and_at_the_end(step: int, every: int | None, due: bool) -> None:
    assert is_due(step, every, STEPS) is due
