"""One start of a training run in this process, on one rank, with evaluations of the test's own."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.support.jobs import tiny_job
from trainer.checkpoint.identity import RunIdentity
from trainer.checkpoint.memory_restore import FromMemory
from trainer.checkpoint.resume import StartPoint, best_value
from trainer.checkpoint.writer import CheckpointWriter
from trainer.comm.protocol import Comm
from trainer.config.batch_plan import plan, schedule
from trainer.data.lanes import Lanes
from trainer.data.source import open_source
from trainer.model.build import build_model
from trainer.run.layout import Run
from trainer.train.checkpoint_policy import CheckpointPolicy
from trainer.train.loop import Loop
from trainer.train.monitors import open_monitors
from trainer.train.requests import Requests
from trainer.train.setup import TrainSetup
from trainer.train.step import TrainStep

__all__ = ["TrainSetup", "from_memory", "run", "save", "setup_of"]


def setup_of(
    folder: Path, comm: Comm, evaluate: Callable[[], Any], /, steps_done: int = 0, **sections: Any
) -> TrainSetup:
    """A run of four steps in the folder of this rank, whose evaluations are `evaluate`."""
    sections["eval"] = {"zero_shot": ("val",), "retrieval": ("val.csv",), **sections.get("eval", {})}
    sections["logging"] = {"tensorboard": False, **sections.get("logging", {})}
    job = tiny_job(**sections)
    batch_plan, source = plan(job, comm.world.size), open_source(job.data)
    order = Lanes(8, job.optim.global_batch_size)
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder)
    clip = build_model(job, batch_plan, comm)
    return TrainSetup(
        job=job,
        comm=comm,
        run=run,
        plan=batch_plan,
        schedule=schedule(job, len(source)),
        clip=clip,
        train_step=TrainStep(job, batch_plan, comm, clip.model),
        source=source,
        weights=None,
        order=order,
        evaluate=evaluate,
        writer=CheckpointWriter(run.checkpoints, job.checkpoint, 0, 1, 30.0),
        requests=Requests(folder, 0, comm.heartbeat),
        identity=RunIdentity(job, len(source), order=asdict(order)),
        start=StartPoint(steps_done, None),
        started=time.monotonic(),
    )


def run(setup: TrainSetup) -> Any:
    """The whole training of one start."""
    best = best_value(setup.job, setup.comm, setup.run.checkpoints)
    policy = CheckpointPolicy(
        setup.job.checkpoint, setup.job.eval, setup.schedule, setup.start.saved_step, best
    )
    with open_monitors(setup) as monitors:
        return Loop(setup, monitors, policy).run()


def save(folder: Path, train: TrainStep, step: int, facts: dict[str, Any], keep: int = 3) -> Path:
    """Writes a checkpoint; returns its folder."""
    writer = CheckpointWriter(folder, tiny_job(checkpoint={"keep": keep}).checkpoint, 0, 1, 30.0)
    writer.save(step, train, facts)
    writer.finish()
    return folder / f"step-{step:08d}"


def from_memory(setup: TrainSetup, step: int, saved_step: int) -> TrainSetup:
    """A start at a step that was kept in memory, when the checkpoint of an earlier step is the newest."""
    found = FromMemory(step, "here", saved_step, {"step": step, "loss": 0.25}, None, 0)
    return replace(setup, start=StartPoint(step, None, found))
