"""The check that `make gpu-kit` takes to a GPU machine runs here on null GPUs, all but the times."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ON_TWO = {
    "B-32-small": "done",
    "B-32-small-graphs": "done",
    "B-32-small-compiled": "done",
    "B-32-small-overhead": "done",
    "nccl": "done",
    "B-32-torch": "done",
    "B-32-fsdp": "done",
    "B-32-horovod": "not tried",
    "run": "done",
    "L-14-336-long": "done",
    "L-14-336-flash": "done",
    "L-14-336-cudnn": "done",
    "B-32-77-one": "done",
    "B-32-77-long": "done",
    "B-32-captions-varlen": "done",
    "B-32-captions-unpacked": "done",
    "jpeg": "not tried",
}
"""One part of each kind, and how it ends: nvJPEG is a real library, which finds no GPU, and the Horovod of
the tests has no NCCL."""


def check(out: Path, *names: str, gpus: int = 1) -> dict[str, Any]:
    """Runs these parts and returns what the summary says of each."""
    options = ["--only", ",".join(names), "--slower", "10", "--seconds", "100000", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NULLGPU_DEVICES": str(gpus)},
    )
    print(done.stdout, done.stderr)
    parts: dict[str, Any] = json.loads((out / "summary.md").read_text().splitlines()[-1])["parts"]
    return parts


def test_parts_run_and_their_ends_stand_in_the_summary(tmp_path: Path) -> None:
    parts = check(tmp_path, "machine", "profile-B-32", "B-32-torch")
    assert [part["end"] for part in parts.values()] == ["done", "not tried", "done"]
    assert "TFLOP/s" in parts["machine"]["text"]
    assert parts["B-32-torch"]["text"] == "it needs 2 GPUs"
    assert (tmp_path / "trace-B-32.json.gz").is_file()


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_each_kind_of_part_runs_to_its_end_on_two_null_gpus(tmp_path: Path) -> None:
    parts = check(tmp_path, *ON_TWO, gpus=2)
    assert {name: part["end"] for name, part in parts.items()} == ON_TWO
    assert parts["B-32-small-graphs"]["found"]["share"] > 0
    assert {"first_checkpoint_s", "later_checkpoint_s", "next_step_s"} <= parts["run"]["found"].keys()
    assert parts["nccl"]["found"]["gpus"] == 2
