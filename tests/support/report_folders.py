"""Run folders for tests of the report, written as runs write them."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from trainer.report.board import Text, row, write_board
from trainer.run.exit_record import ExitRecord
from trainer.telemetry.records import Record

JOB = """name = {name}
[data]
format = "synthetic"
[model]
name = "ViT-B-32"
precision = "bf16"
[optim]
global_batch_size = 512
steps = {steps}
loss = "clip"
[env]
HF_TOKEN = "a-secret"
"""


def long_run(
    folder: Path,
    *,
    name: str = "first-run",
    steps: int = 2000,
    every: int = 20,
    ranks: int = 4,
    finished: bool = True,
) -> Path:
    """Records, evaluations, checkpoints, environment, logs and a board; an unfinished run has no result."""
    (folder / "logs").mkdir(parents=True)
    (folder / "job.toml").write_text(JOB.format(name=json.dumps(name), steps=steps))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events(steps, every)))
    (folder / "environment.json").write_text(json.dumps([environment(rank) for rank in range(ranks)]))
    for rank in range(ranks):
        (folder / "logs" / f"rank-{rank:05d}.log").write_text(f"2026-01-01 INFO first line of rank {rank}\n")
    write_board(folder, board())
    if finished:
        done = {
            "exit_code": 0,
            "reason": "done",
            "steps": steps,
            "samples": steps * 512,
            "loss": 0.4,
            "zero_shot_top1": 0.7,
        }
        (folder / "result.json").write_text(json.dumps({**done, "world_size": ranks, "seconds": 2460.5}))
    return folder


def failed_run(
    folder: Path,
    *,
    name: str = "first-run",
    reason: str = "ValueError: no such thing",
    details: str = "Traceback",
    log: str = "last words",
) -> Path:
    """Rank 2 ends the run half way."""
    long_run(folder, name=name, finished=False, steps=400)
    (folder / "exit.json").write_text(json.dumps(asdict(ExitRecord(2, "node-1", 1, reason, 0.0, details))))
    (folder / "logs" / "rank-00002.log").write_text(f"{log}\n")
    return folder


def timed_out_run(folder: Path) -> Path:
    """Rank 1 is late, and the supervisors say so."""
    long_run(folder, finished=False, steps=400)
    (folder / "exit.json").write_text(
        json.dumps(
            asdict(ExitRecord(1, "node-0", 124, "timed out: step 401 took 300 s", 0.0, "late: rank 1"))
        )
    )
    ranks = [{**WAITING, "rank": rank, "node": f"node-{rank // 2}"} for rank in range(4)]
    ranks[1] |= {"state": "stopped by a signal", "collectives": 1602, "stack": "File loop.py, line 7 in run"}
    (folder / "diagnosis.json").write_text(
        json.dumps({"exit_code": 124, "what": "step", "late": [1], "missing": [], "ranks": ranks})
    )
    return folder


WAITING: dict[str, Any] = {
    "pid": 7, "phase": "step", "step": 401, "phase_s": 300.2, "limit_s": 300.0,
    "collectives": 1603, "collective": "all_gather", "waiting": True,
    "state": "sleeping", "kernel": "", "stack": "",
}  # fmt: skip


def events(steps: int, every: int) -> Iterator[dict[str, Any]]:
    """Lines of metrics.jsonl."""
    chance = random.Random(0)
    yield asdict(record(1, chance, data_s=6.0))
    for step in range(every, steps + 1, every):
        yield asdict(record(step, chance))
        if step % (5 * every) == 0:
            yield {"step": step, **evaluation(step / steps)}
            yield {
                "step": step,
                "checkpoint": f"step-{step:08d}",
                "checkpoint_bytes": 1_700_000_000,
                "write_s": 4.2,
            }


def record(step: int, chance: random.Random, data_s: float = 0.02) -> Record:
    compute_s, comm_s = chance.uniform(0.3, 0.34), chance.uniform(0.05, 0.09)
    step_s = data_s + compute_s + comm_s
    loss = 5 * math.exp(-step / 500) + 0.4 + chance.gauss(0, 0.08)
    grad_norm, lr = 30 * math.exp(-step / 90) + chance.uniform(0.6, 1.4), 5e-4 * min(step / 200, 1.0)
    scale = 14.3 + step / 300
    return Record(
        step,
        step // 100,
        step * 512,
        loss,
        lr,
        grad_norm,
        scale,
        512 / step_s,
        step_s,
        data_s,
        compute_s,
        comm_s,
        0.0,
    )


def evaluation(share: float) -> dict[str, float | int]:
    """The names of result.json; better as training goes on, at `share` of it."""
    recalls = {
        f"retrieval_{way}_r{k}": share * (0.4 + 0.05 * k) for way in ("i2t", "t2i") for k in (1, 5, 10)
    }
    medians = {f"retrieval_{way}_median_rank": 40.0 - 30 * share for way in ("i2t", "t2i")}
    return {
        "zero_shot_samples": 5000,
        "zero_shot_top1": 0.7 * share,
        "zero_shot_top5": 0.9 * share,
        **recalls,
        **medians,
    }


def restarted_run(folder: Path, *, cause: str = "killed by SIGKILL in step, step 1200") -> Path:
    """A run of two starts; in the first one a fault came, and the ranks began again."""
    long_run(folder, steps=2000, every=100)
    begin = {"event": "begin", "start": "a", "generation": 1, "began": 1000.0, "from_step": 0, "time": 1060.0}
    laps: list[dict[str, Any]] = [
        {"event": "steps", "time": 1060.0 + step, "step": step, "steps": 100, "seconds": 100.0, "data_s": 5.0}
        for step in range(100, 1200, 100)
    ]
    fault = {"cause": cause, "rank": 3, "node": "node-1", "step": 1200, "from_step": 900}
    found = {"time": 2330.0, "seconds": 41.5, "parts": {"detect": 0.4, "start": 9.0}}
    node = {"node": "node-1", "kind": "failed", "reason": "it has failed twice", "members": [], "since": 1.0}
    world = {"ranks": 6, "left_out": [node]}
    restart = {"event": "restart", "start": "a", "generation": 2, **fault, **found, **world}
    again = {**begin, "generation": 2, "from_step": 900, "time": 2360.0}
    later = [{**lap, "time": lap["time"] + 400} for lap in laps if lap["step"] > 900]
    next_start = {**begin, "start": "b", "from_step": 1100, "began": 90_000.0, "time": 90_050.0}
    events = [begin, *laps, restart, again, *later, next_start]
    (folder / "goodput.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def environment(rank: int) -> dict[str, str]:
    """Rank 3 has another torch."""
    versions = {"torch": "2.14.1" if rank != 3 else "2.14.0", "numpy": "2.4.6"}
    return {
        "rank": str(rank),
        "node": f"node-{rank // 2}",
        "backend": "torch (nccl)",
        "device": f"cuda:{rank % 2}",
        **versions,
    }


def board() -> list[Any]:
    captions = (
        "a red square on a wall",
        "the sea at noon, seen from a long way off",
        "a green field",
        "something purple",
    )
    colors = ("#c33c3c", "#3c64c3", "#3ca05a", "#7d3cc3")
    return [
        row(Image.new("RGB", (300, 200), color), texts(captions, own)) for own, color in enumerate(colors)
    ]


def texts(captions: Sequence[str], own: int) -> list[Text]:
    return [Text(caption, 0.31 - 0.02 * place, place == own) for place, caption in enumerate(captions)]
