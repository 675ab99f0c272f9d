"""Decides after each step whether to save and to evaluate, and which checkpoint is the best.

It opens no file and talks to no other rank, and its clock is an argument, so every decision can be tested by
itself. All ranks come to the same decisions. Imports no torch.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.config import Checkpoint, Eval
from trainer.config.batch_plan import Schedule

Metrics = Mapping[str, float | int]
"""Results of an evaluation, under the names of result.json."""


@dataclass(frozen=True)
class AfterStep:
    """Actions after a step, in this order."""

    save: bool
    """True if a checkpoint of the step is due and not saved yet."""
    evaluate: bool
    """True if an evaluation is due; a checkpoint that is due with it must be on disk before."""


@dataclass(frozen=True)
class AfterEvaluation:
    """Actions after an evaluation; at most one of `save` and `record` is true."""

    save: bool
    """True if a checkpoint of the step is due only now: it is the best, or a stop ended the evaluation."""
    record: bool
    """True if the step's checkpoint is saved already and gets the metrics."""
    best: tuple[str, float] | None
    """Name and value of the metric `checkpoint.best` if this step is the best so far."""


class CheckpointPolicy:
    """Decides for one start of a run; the loop asks it after each step and reports each save to it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        evaluation: Eval,
        schedule: Schedule,
        saved_step: int,
        best: float = -math.inf,
        now: Callable[[], float] = time.monotonic,
        saved_ago_s: float = 0.0,
    ) -> None:
        """`saved_step` is the step of the newest checkpoint of the run, often the one that is restored.

        `best` is the best value of the metric `checkpoint.best` in earlier starts; `now` returns seconds;
        `saved_ago_s` are the seconds since the newest checkpoint was saved.
        """
        self._checkpoint, self._evaluation, self._schedule = checkpoint, evaluation, schedule
        self._best, self._now = best, now
        self._saved_step, self._saved_at = saved_step, now() - saved_ago_s
        self._has_evaluated = False

    @property
    def saved_step(self) -> int:
        """Step of this start's last checkpoint; that of the newest one before it if it has saved none."""
        return self._saved_step

    def pop_overdue(self) -> bool:
        """Returns whether `checkpoint.every_minutes` have passed since the last save or the last True.

        Only rank 0 may call it: the ranks' clocks differ, so its answer goes to the others as a request.
        """
        minutes = self._checkpoint.every_minutes
        overdue = minutes is not None and self._now() - self._saved_at > 60 * minutes
        if overdue:
            self._saved_at = self._now()  # it asks only once: all ranks receive it a step later
        return overdue

    def after_step(self, step: int, *, stop: bool, save: bool) -> AfterStep:
        """Returns what to do after a step, given the requests to stop and to save.

        A run that is asked to stop has no time for an evaluation.
        """
        evaluate = self._is_evaluation_due(step) and not stop
        due = stop or save or self._is_due(step, self._checkpoint.every_steps) or self._is_last(step)
        due = due or (evaluate and self._may_end_by_evaluation)
        return AfterStep(due and step != self._saved_step, evaluate)

    @property
    def _may_end_by_evaluation(self) -> bool:
        """True if a failed evaluation ends the run, or if none has ended well in this start."""
        measures = self._evaluation.in_the_run
        return measures and (self._evaluation.on_failure == "stop" or not self._has_evaluated)

    def missed(self, step: int) -> bool:
        """Returns whether a checkpoint was due after the last save and up to this step.

        So it is for ranks that go on from memory, if those before them ended while they wrote it.
        """
        every = self._checkpoint.every_steps
        return every is not None and every > 0 and step // every > self._saved_step // every

    def saved(self, step: int) -> None:
        """Records that a checkpoint of the step is saved, or on its way to the disk."""
        self._saved_step, self._saved_at = step, self._now()

    def after_evaluation(self, step: int, metrics: Metrics, *, stop: bool) -> AfterEvaluation:
        """Returns what to do after an evaluation, and remembers its value if it is the best so far.

        `metrics` is empty if a request to stop ended the evaluation (`stop`), or if the job asks for none.
        """
        self._has_evaluated |= bool(metrics)
        best = self._new_best(metrics)
        if step == self._saved_step:
            return AfterEvaluation(save=False, record=bool(metrics), best=best)
        return AfterEvaluation(save=best is not None or stop, record=False, best=best)

    def _new_best(self, metrics: Metrics) -> tuple[str, float] | None:
        name = self._checkpoint.best
        if name is None or not metrics:
            return None
        value = float(metrics[name])
        if not value > self._best:  # NaN is never the best
            return None
        self._best = value
        return name, value

    def _is_evaluation_due(self, step: int) -> bool:
        epochs = self._evaluation.every_epochs
        own, epoch_steps = self._schedule.own(step), self._schedule.epoch_steps
        at_epoch = epochs is not None and own % (epochs * epoch_steps) == 0
        return at_epoch or self._is_due(step, self._evaluation.every_steps) or self._is_last(step)

    def _is_due(self, step: int, every: int | None) -> bool:
        return is_due(step, every, self._schedule.steps)

    def _is_last(self, step: int) -> bool:
        return step == self._schedule.steps


def is_due(step: int, every: int | None, last: int) -> bool:
    """Returns whether a step is a multiple of `every`, or the last step.

    Always False if `every` is 0 or None.
    """
    return every is not None and every > 0 and (step % every == 0 or step == last)
