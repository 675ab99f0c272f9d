"""The training loop: next batch, step, log. One pass of `run` is the whole training."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from trainer import optim
from trainer.comm.protocol import Comm
from trainer.comm.replicas import check_replicas
from trainer.data.loader import Batch, train_batches
from trainer.data.source import Source
from trainer.job import Job
from trainer.model import Clip
from trainer.plan import Plan
from trainer.run import Run
from trainer.step import MicroBatch, StepResult, TrainStep
from trainer.telemetry import Clock, Record, Telemetry


@dataclass
class Loop:
    """What the loop works on."""

    job: Job
    comm: Comm
    run_folder: Run
    plan: Plan
    clip: Clip
    step: TrainStep
    steps: int

    def run(self, source: Source) -> Record:
        """Collective: all steps; returns the last one's record."""
        batches = self._global_batches(source)
        clock = Clock()
        self.clip.model.train()
        with Telemetry(self.run_folder.metrics if self.comm.world.rank == 0 else None, self.steps) as telemetry:
            for done in range(1, self.steps + 1):
                with clock.spent_on("data_s"):
                    micro, epoch = next(batches)
                rate = optim.learning_rate(self.job.optim, done - 1, self.steps)
                optim.set_learning_rate(self.step.optimizer, rate)
                result = self.step(micro, done - 1)
                clock.step_done()
                if self._due(done, self.job.logging.every_steps):
                    record = self._record(done, epoch, rate, result, clock)
                    telemetry.write(record)
                if self._due(done, self.job.comm.check_replicas_steps):
                    check_replicas(self.comm, self.clip.model, self.step.optimizer)
        return record

    def _due(self, done: int, every: int) -> bool:
        """At the first step, every so many, and at the last; never for 0."""
        return every > 0 and (done == 1 or done % every == 0 or done == self.steps)

    def _global_batches(self, source: Source) -> Iterator[tuple[list[MicroBatch], int]]:
        """This rank's micro-batches of each global batch, on the device, with their epoch."""
        stream = train_batches(
            source,
            plan=self.plan,
            rank=self.comm.world.rank,
            seed=self.job.seed,
            window=self.job.data.shuffle_window,
            transform=self.clip.train_transform,
            tokenizer=self.clip.tokenizer,
            workers=self.job.data.workers,
            pin_memory=self.comm.device.type == "cuda",
        )
        while group := list(islice(stream, self.plan.accumulation)):
            yield [self._on_device(batch) for batch in group], group[0].epoch

    def _on_device(self, batch: Batch) -> MicroBatch:
        return MicroBatch(*(tensor.to(self.comm.device, non_blocking=True) for tensor in (batch.images, batch.tokens)))

    def _record(self, done: int, epoch: int, rate: float, result: StepResult, clock: Clock) -> Record:
        """Collective: what this step leaves, with the time of the steps since the last record."""
        samples = self.plan.global_batch_size
        loss = float(self.comm.all_reduce(result.loss_share))
        times = clock.pop(self.comm.pop_seconds())
        scale = float(self.clip.model.logit_scale.detach().exp())  # type: ignore[operator]
        return Record(done, epoch, done * samples, loss, rate, float(result.grad_norm), scale, samples / times["step_s"], **times)
