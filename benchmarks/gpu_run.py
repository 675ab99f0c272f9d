"""A real run on one GPU from shards of JPEGs, whose rank is killed: `python -m benchmarks.gpu_run`.

Prints each line of the run with its second, then speed, share of waits for data, and the seconds that a
checkpoint and the restart took.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import tomli_w

from benchmarks.data import photographs
from trainer.data.shard_files import write_shards

SAMPLES, PER_SHARD, BATCH, STEPS, KILLED_AT = 2048, 512, 512, 160, 100
_WARM = 20
"""Steps of a start whose speed does not count."""


def job(folder: Path, shards: int) -> dict[str, Any]:
    """The job of the run, as a table."""
    return {
        "name": "gpu",
        "data": {
            "train": f"{folder}/shards/shard-{{000000..{shards - 1:06d}}}.tar",
            "workers": max(2, min(12, (os.cpu_count() or 4) - 2)),
        },
        "model": {"name": "ViT-B-32", "precision": "bf16"},
        "optim": {"global_batch_size": BATCH, "steps": STEPS, "lr": 1e-4, "warmup_steps": 10},
        "resources": {"gpus_per_node": 1},
        "checkpoint": {"every_steps": 60},
        "recovery": {"max_restarts": 2},
        "logging": {"runs": f"{folder}/runs", "every_steps": 10, "tensorboard": False},
    }


def main() -> None:
    """Run it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shards").mkdir()
        shards = write_shards(photographs(512, 384, SAMPLES), folder / "shards", PER_SHARD)
        (folder / "job.toml").write_text(tomli_w.dumps(job(folder, len(shards))))
        code, killed_s, back_s = watch(folder / "job.toml")
        print(f"exit code {code}")
        rows = [json.loads(line) for line in (folder / "runs/gpu/metrics.jsonl").read_text().splitlines()]
        summarise(rows, back_s - killed_s if killed_s and back_s else None)
    raise SystemExit(code)


def watch(path: Path) -> tuple[int, float | None, float | None]:
    """Runs the job and kills its rank; returns its exit code, when that was, and when a step came."""
    began = time.monotonic()
    killed = back = None
    command = [sys.executable, "-m", "trainer.cli.main", "run", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        now = time.monotonic() - began
        print(f"{now:7.2f} {line}", end="", flush=True)
        if killed is None and line.startswith(f"step {KILLED_AT}/"):
            os.kill(rank_of(process.pid), signal.SIGKILL)
            killed = now
        elif killed is not None and back is None and f"step {KILLED_AT}/" in line:
            back = now
    return process.wait(), killed, back


def rank_of(launcher: int) -> int:
    """The process that holds the model: the largest below the launcher."""
    below = psutil.Process(launcher).children(recursive=True)
    return int(max(below, key=lambda process: process.memory_info().rss).pid)


def summarise(rows: list[dict[str, Any]], back_s: float | None) -> None:
    """Prints what the run's records say."""
    steps = [row for row in rows if "samples_per_s" in row and row["step"] > _WARM]
    if steps:
        waits = median(row["data_s"] for row in steps)
        print(f"median {median(row['samples_per_s'] for row in steps):,.0f} samples/s, data_s {waits:.4f}")
    for row in rows:
        if "checkpoint" in json.dumps(row) and "samples_per_s" not in row:
            print(json.dumps(row)[:200])
    print(f"from the kill to step {KILLED_AT} again: " + (f"{back_s:.1f} s" if back_s else "not seen"))


if __name__ == "__main__":
    main()
