"""The training loop's order of things: what is saved before what, and which checkpoint is the best. One rank, a few steps."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import tiny_job
from trainer import model, optim
from trainer.checkpoint import files
from trainer.checkpoint.writer import Writer
from trainer.comm.protocol import Comm
from trainer.data.source import open_source
from trainer.health.requests import Requests
from trainer.loop import Loop, Metrics
from trainer.plan import plan, schedule
from trainer.run import Run
from trainer.step import TrainStep

STEPS = 4


@pytest.fixture(autouse=True)
def stop_signal() -> Iterator[None]:
    """What a loop does on a request to stop ends with the test."""
    before = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, before)


def loop_of(folder: Path, comm: Comm, evaluate: Callable[[], Metrics], **sections: dict[str, Any]) -> Loop:
    """A run of four steps in the folder, whose evaluations are `evaluate`."""
    sections["eval"] = {"zero_shot": ("val",), "retrieval": ("val.csv",), **sections.get("eval", {})}
    job = tiny_job(**sections, logging={"tensorboard": False})  # type: ignore[arg-type]
    cut, source, run = plan(job, 1), open_source(job.data), Run(folder)
    clip = model.build(job, cut, comm)
    train = TrainStep(job, cut, comm, clip.model, optim.build(clip.model, job.optim, comm.device))
    writer = Writer(run.checkpoints, job.checkpoint, 0, 1, 30.0)
    requests = Requests(folder, 0, comm.pulse)
    return Loop(job, comm, run, cut, schedule(job, len(source)), clip, train, source, None, evaluate, writer, requests)


def saved(loop: Loop) -> list[int]:
    """The steps whose checkpoints are there."""
    return sorted(int(folder.name.removeprefix("step-")) for folder in files.newest_first(loop.run_folder.checkpoints))


def test_the_best_of_another_metric_is_no_measure(tmp_path: Path, alone: Comm) -> None:
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    files.note_best(tmp_path / "checkpoints", 1, "zero_shot_top1", 0.6)
    loop = loop_of(tmp_path, alone, lambda: {"retrieval_i2t_r1": 0.35}, checkpoint={"best": "retrieval_i2t_r1"})
    assert loop.run(STEPS - 1) == {"retrieval_i2t_r1": 0.35}
    assert files.best_so_far(loop.run_folder.checkpoints) == {"step": STEPS, "metric": "retrieval_i2t_r1", "value": 0.35}
