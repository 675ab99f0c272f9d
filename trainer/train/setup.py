"""Everything that the training of one start works on, complete before the first step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trainer.checkpoint.identity import RunIdentity
from trainer.checkpoint.memory_keeper import MemoryKeeper
from trainer.checkpoint.resume import StartPoint
from trainer.checkpoint.writer import CheckpointWriter
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import BatchPlan, Schedule
from trainer.copies.copier import Copier
from trainer.data.lanes import Lanes
from trainer.data.source import Source
from trainer.data.targets import Targets
from trainer.model.build import Clip
from trainer.run.layout import Run
from trainer.train.checkpoint_policy import Metrics
from trainer.train.requests import Requests
from trainer.train.step import TrainStep


@dataclass(frozen=True)
class TrainSetup:
    """A run that can begin or go on: its input has been checked and its state restored."""

    job: Job
    comm: Comm
    run: Run
    plan: BatchPlan
    schedule: Schedule
    clip: Clip
    train_step: TrainStep
    source: Source
    weights: Sequence[float] | None
    """Weight of each shard: how many times an epoch contains its samples."""
    order: Lanes
    evaluate: Callable[[], Metrics]
    """Collective: returns the metrics that the job asks for, of the model as it is now.

    Raises Preempted on every rank if one was asked to stop meanwhile.
    """
    writer: CheckpointWriter
    requests: Requests
    identity: RunIdentity
    start: StartPoint
    """Step that this start begins after, and the checkpoint or the memory that it comes from."""
    started: float
    """Time when this start began to prepare, in seconds since the epoch."""
    copier: Copier | None = None
    """Copies the checkpoints; None on all ranks but 0, and if the job does not ask for that."""
    targets: Targets | None = None
    """Features that teachers have stored of the samples; None if the job names none."""
    keeper: MemoryKeeper | None = None
    """Keeps the newest steps in memory; None if the job does not ask for that."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of samples in the data of all stages that are not used, by cause or filter."""

    def samples_after(self, step: int) -> int:
        """Returns how many samples the run has seen after a step of this stage."""
        return self.schedule.samples_before + self.schedule.own(step) * self.plan.global_batch_size
