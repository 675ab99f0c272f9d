"""Checkpoint folders: what stays, what goes, and what a rank tells of its part."""

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.checkpoint import files
from trainer.checkpoint.files import Folder
from trainer.config.batch_plan import schedule
from trainer.run.checkpoints import newest_step, newest_whole
from trainer.train.checkpoint_policy import CheckpointPolicy


def _content(path: Path) -> None:
    path.write_text("content")


def publish(checkpoints: Path, *steps: int) -> None:
    for step in steps:
        folder = Folder(checkpoints, step)
        folder.write("part", _content)
        folder.publish(["part"], {}, 1.0)


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


@pytest.mark.parametrize(
    ("locked", "left"), [("step-00000002", "step-00000002"), ("held", ".step-00000002.removed")]
)
def test_a_checkpoint_that_cannot_be_removed_is_told_once_and_stops_nothing(
    locked: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(change: Callable[..., None]) -> Callable[..., None]:
        def changed(path: Any, *rest: Any, **more: Any) -> None:
            if os.path.basename(path) == locked:
                raise PermissionError(1, "Operation not permitted", str(path))
            change(path, *rest, **more)

        return changed

    publish(tmp_path, 2, 4, 6)
    (tmp_path / "step-00000002" / "held").write_text("")
    with monkeypatch.context() as locking:
        locking.setattr(os, "rename", refusing(os.rename))
        locking.setattr(os, "unlink", refusing(os.unlink))
        files.prune(tmp_path, 2)
        files.prune(tmp_path, 1)
    assert names(tmp_path) == [left, "step-00000006"]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert f"{tmp_path / left} is not needed any more and cannot be removed" in told[0]
    publish(tmp_path, 2)
    files.prune(tmp_path, 1)
    assert "step-00000002" not in names(tmp_path)


def test_the_best_checkpoint_is_forgotten_if_its_step_is_set_aside(tmp_path: Path) -> None:
    publish(tmp_path, 2, 4, 6)
    files.record_best(tmp_path, 4, "zero_shot_top1", 0.5)
    files.set_aside(tmp_path, 4)
    assert files.best_so_far(tmp_path) == {"step": 4, "metric": "zero_shot_top1", "value": 0.5}
    files.set_aside(tmp_path, 2)
    assert names(tmp_path) == ["aside-step-00000004", "aside-step-00000006", "step-00000002"]
    publish(tmp_path, 4)
    assert files.best_so_far(tmp_path) is None
    assert [path.name for path in files.set_aside(tmp_path, 2)] == ["aside-step-00000004-1"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"step": "2"}', '{"step": 2, "metric": "loss", "value": "low"}', "removed"]
)
def test_a_record_of_the_best_checkpoint_that_is_malformed_or_without_it_counts_as_none(
    tmp_path: Path, text: str
) -> None:
    publish(tmp_path, 2, 4)
    files.record_best(tmp_path, 2, "zero_shot_top1", 0.5)
    if text == "removed":
        files.remove(tmp_path / "step-00000002")
    else:
        (tmp_path / "best.json").write_text(text)
    assert files.best_so_far(tmp_path) is None


def test_a_part_marked_as_failed_ends_the_wait_for_it(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 7)
    folder.write("mine", _content)
    folder.mark_failed(1, OSError(28, "No space left on device"))
    with pytest.raises(OSError, match=r"checkpoint of step 7: rank 1: .*No space left on device"):
        folder.publish(["mine", "theirs"], {}, timeout_s=1000.0)


def test_copies_that_a_user_keeps_beside_the_checkpoints_are_neither_read_nor_touched(tmp_path: Path) -> None:
    publish(tmp_path, 2, 4)
    kept = {"step-00000002.keep", "step-00000002 (copy)", "step-best", "step-3", ".step-00000002.keep"}
    for name in kept:
        shutil.copytree(tmp_path / "step-00000002", tmp_path / name)
    (tmp_path / "step-00000009").write_text("a note")
    assert files.newest(tmp_path).name == "step-00000004"
    assert newest_step(tmp_path) == 4
    assert newest_whole(tmp_path) == (4, tmp_path / "step-00000004")
    publish(tmp_path, 6)
    files.prune(tmp_path, keep=1)
    files.remove_leftovers(tmp_path)
    assert [path.name for path in files.set_aside(tmp_path, 1)] == ["aside-step-00000006"]
    assert set(names(tmp_path)) == {*kept, "aside-step-00000006", "step-00000009"}


def test_checkpoints_are_in_the_order_of_their_steps_not_of_their_names(tmp_path: Path) -> None:
    publish(tmp_path, 99_999_999, 100_000_000)
    assert newest_step(tmp_path) == 100_000_000
    files.prune(tmp_path, keep=1)
    assert names(tmp_path) == ["step-100000000"]


# Decisions of the checkpoint policy: when to save, when to evaluate, which checkpoint is the best.

STEPS = 10
LENGTH = schedule(tiny_job(optim={"steps": STEPS}), 64)
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
    return CheckpointPolicy(job.checkpoint, job.eval, LENGTH, steps_done, best, clock or Clock())


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
