"""A run with a moving average of its weights: evaluated, saved, restored, and evaluated by hand."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from tests.support.runs import LIMIT_S, TinyRun
from trainer.config.results import EMA
from trainer.data.shard_files import PackedSample, write_shards

SECTIONS: dict[str, dict[str, Any]] = {
    "optim": {"steps": 30, "lr": 1e-2, "ema_decay": 0.97, "ema_from_step": 2},
    "checkpoint": {"every_steps": 3, "keep": 30},
}


def digits() -> Iterator[PackedSample]:
    found = load_digits()
    for number in range(24):
        file = io.BytesIO()
        Image.fromarray((found.images[number] * 15).astype(np.uint8)).resize((32, 32)).save(file, "png")
        label = str(int(found.target[number]))
        yield f"{number:02d}", {"png": file.getvalue(), "txt": f"{label} {number}".encode()}


def job(run: TinyRun, shard: str, backend: str) -> None:
    comm = {"backend": backend, "deterministic": backend == "torch"}
    run.write(**SECTIONS, comm=comm, eval={"retrieval": [shard], "batch_size": 4})


def measured(weights: Path) -> dict[str, float]:
    """Metrics that `clipship eval` prints of a file of weights."""
    command = [sys.executable, "-m", "trainer.cli.main", "eval", str(weights), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    return {name: value for name, value in printed.items() if name.startswith("retrieval_")}


@pytest.mark.parametrize("backend", ["torch", pytest.param("fsdp", marks=pytest.mark.full)])
def test_the_average_is_measured_saved_and_goes_on_after_a_kill(tmp_path: Path, backend: str) -> None:
    [shard] = write_shards(digits(), tmp_path, 24)
    whole, killed = TinyRun(tmp_path, "whole"), TinyRun(tmp_path, "killed")
    for run in (whole, killed):
        job(run, str(tmp_path / shard), backend)
    done = whole.start(2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(EMA)") == 2, done.stdout
    killed.start_and_kill(2, at_step=8)
    done = killed.start(2)
    assert done.returncode == 0, done.stderr
    folders = [run.run / "checkpoints" / "step-00000030" for run in (whole, killed)]
    for name in ("model.pt", "ema.pt"):
        expected, found = (torch.load(folder / name, weights_only=True) for folder in folders)
        assert expected.keys() == found.keys()
        assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    plain, average = measured(folders[0] / "model.pt"), measured(folders[0] / "ema.pt")
    assert plain != average
    result = whole.result()
    assert {name: result[name] for name in plain} == plain
    assert {name: result[f"{EMA}{name}"] for name in average} == average
