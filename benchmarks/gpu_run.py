"""A real run on one GPU from shards of JPEGs, whose rank is killed: `python -m benchmarks.gpu_run`.

Prints each line of the run with its second, then speed and share of waits for data, how long the first
checkpoint and a later one held the steps up, and how soon the run went on after the kill. The last line is
JSON. Arguments: pictures and samples of a step, fewer than the 2,048 and 512 of a GPU for a null GPU.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import tomli_w

from benchmarks.data import photographs
from trainer.data.pack import write_shards

STEPS, SAVED, KILLED_AT, LOGGED = 140, 40, 100, 10
"""Steps of the run, between two checkpoints, until the kill, and between two lines of its log."""
_TEXT = (
    "{samples_s} samples/s, data_share {data_share}; the first checkpoint held the steps up for "
    "{first_checkpoint_s} s, the second for {later_checkpoint_s} s; next step {next_step_s} s after kill -9"
)
_SHARDS = 4
_WARM = 20
"""Steps of a start whose speed does not count."""


def job(folder: Path, shards: int, batch: int) -> dict[str, Any]:
    """The job of the run, as a table."""
    return {
        "name": "gpu",
        "data": {
            "train": f"{folder}/shards/shard-{{000000..{shards - 1:06d}}}.tar",
            "workers": max(2, min(12, (os.cpu_count() or 4) - 2)),
        },
        "model": {"name": "ViT-B-32", "precision": "bf16"},
        "optim": {"global_batch_size": batch, "steps": STEPS, "lr": 1e-4, "warmup_steps": 10},
        "resources": {"gpus_per_node": 1},
        "checkpoint": {"every_steps": SAVED},
        "recovery": {"max_restarts": 2},
        "logging": {"runs": f"{folder}/runs", "every_steps": LOGGED, "tensorboard": False},
    }


def main(samples: int = 2048, batch: int = 512) -> None:
    """Run it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shards").mkdir()
        shards = write_shards(photographs(512, 384, samples), folder / "shards", samples // _SHARDS)
        (folder / "job.toml").write_text(tomli_w.dumps(job(folder, len(shards), batch)))
        code, restart = watch(folder / "job.toml")
        print(f"exit code {code}")
        rows = [json.loads(line) for line in (folder / "runs/gpu/metrics.jsonl").read_text().splitlines()]
    if code:
        raise SystemExit(code)
    result = steps_of(rows) | restart
    print(_TEXT.format_map(defaultdict(lambda: "?", result)))
    print(json.dumps(result))


def watch(path: Path) -> tuple[int, dict[str, float]]:
    """Runs the job and kills its rank; returns its exit code, and the seconds from the kill.

    They are those to the next step that ended, and to the end of the one in which the rank was killed.
    """
    began = time.monotonic()
    killed: float | None = None
    restart: dict[str, float] = {}
    command = [sys.executable, "-m", "trainer.cli.main", "run", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        now = time.monotonic() - began
        print(f"{now:7.2f} {line}", end="", flush=True)
        if killed is None and line.startswith(f"step {KILLED_AT}/"):
            os.kill(rank_of(process.pid), signal.SIGKILL)
            killed = now
        elif killed is not None and line.startswith("step "):
            restart.setdefault("next_step_s", round(now - killed, 1))
            if int(line.split()[1].partition("/")[0]) >= KILLED_AT:
                restart.setdefault("same_step_s", round(now - killed, 1))
    return process.wait(), restart


def rank_of(launcher: int) -> int:
    """The process that holds the model: the largest below the launcher."""
    below = psutil.Process(launcher).children(recursive=True)
    return int(max(below, key=lambda process: process.memory_info().rss).pid)


def steps_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns what the records say of speed and checkpoints.

    A checkpoint counts in the record of the steps after it. `checkpoint_s` is how long the loop stood still
    for it, and `longer_s` how much longer those steps took than others, waits for data included.
    """
    laps = {row["step"]: row for row in rows if "samples_per_s" in row}
    warm = [lap for step, lap in laps.items() if _WARM < step <= KILLED_AT]
    saved = [step for step in (SAVED + LOGGED, 2 * SAVED + LOGGED) if step in laps]
    usual_s = median(lap["step_s"] for lap in warm)
    result = {
        "samples_s": round(median(lap["samples_per_s"] for lap in warm)),
        "data_share": round(median(lap["data_s"] / lap["step_s"] for lap in warm), 3),
    }
    for name, step in zip(("first", "later"), saved, strict=False):
        result[f"{name}_checkpoint_s"] = round(LOGGED * laps[step]["checkpoint_s"], 3)
        result[f"{name}_longer_s"] = round(LOGGED * (laps[step]["step_s"] - usual_s), 3)
    return result


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
