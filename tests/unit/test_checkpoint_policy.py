"""Decisions of the checkpoint policy: when to save, when to evaluate, which checkpoint is the best."""

import math
from typing import Any

from tests.support.jobs import tiny_job
from trainer.config.batch_plan import Schedule
from trainer.train.checkpoint_policy import CheckpointPolicy

STEPS = 10


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
