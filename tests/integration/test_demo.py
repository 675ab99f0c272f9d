"""`make demo`, shortened: what it learns, and that a kill half way changes nothing."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import kill_tree

SHORT = ["--set", "optim.epochs=3", "--set", "checkpoint.every_steps=15", "--set", "timeouts.silence_s=60"]


def _command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "trainer.demo", "--folder", str(folder), *SHORT]


def _result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "runs" / "digits" / "result.json").read_text())
    return found


@pytest.mark.full
def test_a_demo_killed_half_way_and_started_again_ends_with_the_same_accuracy(tmp_path: Path) -> None:
    whole = subprocess.run(_command(tmp_path / "whole"), capture_output=True, text=True, check=False)
    assert whole.returncode == 0, whole.stderr
    assert "with the model's answer" in whole.stdout
    assert "zero-shot top-1" in whole.stdout.splitlines()[-3]

    cut = subprocess.Popen(_command(tmp_path / "cut"), stdout=subprocess.DEVNULL)
    checkpoints = tmp_path / "cut" / "runs" / "digits" / "checkpoints"
    while not (checkpoints / "step-00000030").exists() and cut.poll() is None:
        time.sleep(0.01)
    kill_tree(cut.pid)
    assert cut.wait() == -9
    again = subprocess.run(_command(tmp_path / "cut"), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert f"from {checkpoints}" in again.stdout
    expected, found = _result(tmp_path / "whole"), _result(tmp_path / "cut")
    assert expected["zero_shot_top1"] > 0.2  # of ten classes, after three epochs
    assert {key: found[key] for key in ("zero_shot_top1", "loss")} == {
        key: expected[key] for key in ("zero_shot_top1", "loss")
    }
