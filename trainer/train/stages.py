"""Opens the stages of a run: each is a job with its data, and has its place among the run's steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import Schedule, schedule
from trainer.config.stages import stage_title, stages_of
from trainer.data.distributed_index import open_targets, open_together
from trainer.data.order import epoch_samples
from trainer.data.sample import InUnits
from trainer.data.sample_counts import shard_weights
from trainer.data.source import Source
from trainer.data.targets import Targets
from trainer.evaluate.evaluation import Evaluation
from trainer.run.checkpoints import check_no_file, folder_name
from trainer.run.folder import run_folder


@dataclass(frozen=True)
class RunStage:
    """One stage of a run; most runs have one."""

    title: str
    """Name for people; empty if the run has no other stage."""
    job: Job
    source: Source
    targets: Targets | None
    """Features that teachers have stored of the samples; None if the job names none."""
    weights: Sequence[float] | None
    """Weight of each shard: how many times an epoch contains its samples."""
    samples: int
    """Samples of an epoch."""
    schedule: Schedule
    evaluation: Evaluation

    def beginning_with(self, checkpoints: Path) -> Job:
        """Returns the job whose model begins with the weights of the stage before, all of them."""
        weights = checkpoints / folder_name(self.schedule.begin)
        begin = {"init": str(weights), "init_max_missing": 0.0}
        return self.job.model_copy(update={"model": self.job.model.model_copy(update=begin)})


def open_stages(job: Job, comm: Comm) -> list[RunStage]:
    """Collective: opens the data of every stage, so that bad data is found before the first one begins.

    Raises InputError on all ranks alike.
    """
    comm.heartbeat.begin_stage("data index")
    found: list[RunStage] = []
    begin = samples = 0
    for number, own in enumerate(stages_of(job), 1):
        stage = _opened(own, comm, next((each for each in found if each.job.data == own.data), None))
        length = replace(
            stage.schedule, steps=begin + stage.schedule.steps, begin=begin, samples_before=samples
        )
        begin, samples = length.steps, samples + length.own_steps * own.optim.global_batch_size
        found.append(replace(stage, title=stage_title(job, number) if job.stage else "", schedule=length))
    if job.stage:
        check_no_file(job.checkpoint.resume)
    return [replace(each, schedule=replace(each.schedule, last=begin)) for each in found]


def _opened(job: Job, comm: Comm, same: RunStage | None) -> RunStage:
    """Returns a stage as if it were alone; `same` is one with the same data, which is open."""
    if same is not None:
        targets = open_targets(job, same.source, comm)
        return replace(same, job=job, targets=targets, schedule=schedule(job, same.samples))
    source = open_together(job, comm)
    targets = open_targets(job, source, comm)
    evaluation = Evaluation(job, comm, run_folder(job))
    weights = shard_weights(job.data, source.units if isinstance(source, InUnits) else None)
    samples = epoch_samples(source.shard_sizes(), weights)
    return RunStage("", job, source, targets, weights, samples, schedule(job, samples), evaluation)


def at_step(stages: Sequence[RunStage], step: int) -> int:
    """Returns the index of the stage that a step belongs to; a stage's last step is its own."""
    return next((i for i, each in enumerate(stages) if step <= each.schedule.steps), len(stages) - 1)
