"""Checkpoint folders: what stays, what goes, and what a rank tells of its part."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.checkpoint import files
from trainer.checkpoint.files import Folder
from trainer.run.checkpoints import newest_step, newest_whole


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
