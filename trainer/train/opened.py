"""Opens a run for one start: its stages with their data, its folder, and what is kept of it in memory."""

import gc
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.checkpoint.memory_restore import NodeMemory, emptied, node_memory
from trainer.checkpoint.resume import step_to_go_on
from trainer.comm.backends import check_backend
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.config.stages import stages_of
from trainer.copies.copier import Copier
from trainer.model.host_compiler import check_compiler
from trainer.model.packages import check_loss, check_packages, check_teacher_tokens, check_text_mask
from trainer.run.folder import done_text
from trainer.run.layout import Run
from trainer.run.notify import check_address
from trainer.telemetry.writers import check_installed
from trainer.train.hang_limits import limit_learner
from trainer.train.requests import Requests
from trainer.train.run_folder import open_run
from trainer.train.stages import RunStage, at_step, open_stages

log = logging.getLogger("clipship")


@dataclass
class OpenRun:
    """Run whose folder this start holds, with its stages and the one that the start is in."""

    job: Job
    comm: Comm
    run: Run
    stages: Sequence[RunStage]
    number: int
    """Number of that stage in `stages`, from 0."""
    memory: NodeMemory | None
    """Steps that this node keeps in memory; None if the job keeps none."""
    requests: Requests
    started: float
    """Time when this start began to prepare, in seconds since the epoch; the same in all of its stages."""
    copier: Copier | None = None
    """Copies the checkpoints of all stages, from the first of this start on; see `TrainSetup`."""
    goes_on: bool = True
    """True if the stage may have a state to go on from; False if this start has trained the one before."""

    @property
    def stage(self) -> RunStage:
        return self.stages[self.number]

    @property
    def left_out(self) -> dict[str, int]:
        """Number of samples in the data of all stages that are not used, by cause or filter.

        Data that several stages share count once.
        """
        sources = {id(stage.source): stage.source for stage in self.stages}
        return dict(sum((Counter(source.left_out.every) for source in sources.values()), Counter()))

    def begin_next(self) -> None:
        """Collective: goes to the next stage, now that nothing of the last one is in use."""
        gc.collect()  # the last stage's model, loaders and steps in memory are in cycles
        self.comm.barrier(self.job.timeouts.backstop_s)
        self.number, self.goes_on = self.number + 1, False
        self.memory = emptied(self.memory, self.comm, self.job.timeouts.backstop_s)
        self.comm.heartbeat.begin_phase("init")
        self.comm.heartbeat.learner = limit_learner(self.job, self.comm.world, {})


def open_whole(job: Job, comm: Comm) -> OpenRun | None:
    """Collective: opens the data of all stages and the run folder; None if the run is done already.

    Raises InputError on all ranks alike.
    """
    started = time.time()
    check_installed(job.logging)
    check_address(job.logging.notify, os.environ)
    for own in stages_of(job):
        _check(own, comm)
    stages = open_stages(job, comm)
    run = open_run(job, comm)
    asked_steps = stages[-1].schedule.last if job.checkpoint.longer else 0
    if comm.broadcast_object(run.finished_as_asked(job.checkpoint.resume, asked_steps)):
        log.info("%-12s %s", "result", done_text(run, job))
        return None
    memory, number = node_memory(job, comm, os.environ), 0
    if len(stages) > 1:
        number = at_step(stages, step_to_go_on(job, comm, run.checkpoints, memory))
    requests = Requests(run.folder, comm.world.rank, comm.heartbeat)
    return OpenRun(job, comm, run, stages, number, memory, requests, started)


def _check(job: Job, comm: Comm) -> None:
    """Raises InputError for a job, or for a stage, that these ranks cannot train."""
    plan(job, comm.world.size)
    check_backend(job, comm.world.size)
    check_compiler(job.model)
    check_packages(job)
    check_loss(job)
    check_text_mask(job)
    check_teacher_tokens(job.model)
