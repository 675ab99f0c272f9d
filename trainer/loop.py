"""The training loop: next batch, step, log, save, evaluate. One call of `run` is the whole training, from wherever it starts."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch

from trainer import optim
from trainer.agreement import Agreement
from trainer.checkpoint import files
from trainer.checkpoint.writer import Writer
from trainer.comm.protocol import Comm
from trainer.comm.replicas import check_replicas
from trainer.data.bad import Skipped
from trainer.data.loader import Batch, train_batches
from trainer.data.order import epoch_samples
from trainer.data.source import Source
from trainer.data.streams import loader_processes
from trainer.errors import Preempted
from trainer.feed import Feed
from trainer.health.finite import Finite
from trainer.health.requests import Requests
from trainer.health.trace import Trace
from trainer.health.watch import Watch
from trainer.job import Job
from trainer.model import Clip
from trainer.plan import Plan, Schedule
from trainer.ranks import Ranks
from trainer.run import Run, versions
from trainer.sinks import open_sinks
from trainer.step import MicroBatch, StepResult, TrainStep
from trainer.telemetry import Clock, Record, Telemetry

Metrics = Mapping[str, float | int]


@dataclass
class Loop:
    """What the loop works on."""

    job: Job
    comm: Comm
    run_folder: Run
    plan: Plan
    schedule: Schedule
    clip: Clip
    train: TrainStep
    source: Source
    weights: Sequence[float] | None
    """Of each shard: how often an epoch has its samples."""
    evaluate: Callable[[], Metrics]
    """Collective: what the job wants to know of the model now. Raises Preempted on every rank where one was asked to stop meanwhile."""
    writer: Writer
    requests: Requests

    def run(self, steps_done: int) -> Metrics:
        """Collective: the steps that are left; the final evaluation. Raises Preempted when asked to stop, after saving."""
        self.skipped = Skipped(self.job.data.max_bad_share)
        batches = self._global_batches(steps_done)
        agreement = Agreement(self.comm)
        self._saved_at = time.monotonic()
        self._saved_step = steps_done
        self._best: float | None = None
        self._clock = Clock()
        self._watch = Watch(self.job.health, self.comm)
        self._ranks = Ranks(self.comm, self.run_folder.folder, steps_done)
        self._trace = Trace(self.job.comm.timeline, self.run_folder.folder, self.comm)
        self._finite = Finite(self.job.health, self.run_folder.folder, self.comm.world)
        self.clip.model.train()
        with self._open_telemetry(steps_done) as self._telemetry:
            self.comm.pulse.phase("first step", steps_done + 1)  # its data too: loaders start
            metrics: Metrics = {}
            stop = False
            for done in range(steps_done + 1, self.schedule.steps + 1):
                stop, save = self._agreed(agreement, done)
                rate = optim.learning_rate(self.job.optim, done - 1, self.schedule.steps)
                result = self._traced_step(batches, done, rate, first=done == steps_done + 1)
                if self._due(done, self.job.logging.every_steps) or done == steps_done + 1:
                    self._record(done, rate, result)
                if self._due(done, self.job.comm.check_replicas_steps):
                    check_replicas(self.comm, self.clip.model, self.train.optimizer)
                metrics, stop = self._saved_and_evaluated(done, stop, save)
                if stop:
                    break
            if steps_done == self.schedule.steps:  # killed, or stopped, between the last checkpoint and the result
                metrics, stop = self._saved_and_evaluated(steps_done, stop=False, save=False)
            self._close(agreement)
            if stop:
                raise Preempted(f"asked to stop: step {self._saved_step} of {self.schedule.steps} is saved, and the run can go on")
        return metrics

    def summary(self) -> Mapping[str, object]:
        """Not collective, after `run`: what rank 0's time went into, and which ranks were slow."""
        return {**self._ranks.summary(), "slow_ranks": self._watch.slow_ranks}

    def _traced_step(self, batches: Iterator[list[MicroBatch]], done: int, rate: float, *, first: bool) -> StepResult:
        """Collective: one step, recorded where the job wants that; what recording costs belongs to no step."""
        with self._clock.stopped():
            self._trace.begin(done)
        result = self._step(batches, done, rate, first=first)
        with self._clock.stopped():
            self._trace.end(done)
        return result

    def _step(self, batches: Iterator[list[MicroBatch]], done: int, rate: float, *, first: bool) -> StepResult:
        """Collective: one step, its data included. The first of a start has a limit of its own for both."""
        with self._watch.step():
            if not first:
                self.comm.pulse.phase("data", done)
            with self._clock.spent_on("data_s"):
                micro = next(batches)
            if not first:
                self.comm.pulse.phase("step", done)
            optim.set_learning_rate(self.train.optimizer, rate)
            result = self.train(micro, done - 1)
        self._clock.step_done()
        self._finite.judge(done, result, [key for batch in micro for key in batch.keys])
        return result

    def _open_telemetry(self, steps_done: int) -> Telemetry:
        if self.comm.world.rank:
            return Telemetry(None, self.schedule.steps, steps_done)
        sinks = open_sinks(self.job, self.run_folder.folder, steps_done)
        return Telemetry(self.run_folder.metrics, self.schedule.steps, steps_done, sinks)

    def _close(self, agreement: Agreement) -> None:
        """Collective: nothing is under way any more, and the last checkpoint is whole."""
        self.comm.pulse.phase("checkpoint", self.schedule.steps)
        agreement.close()
        self._trace.close()
        self.writer.finish()
        self._note_written()
        self.comm.barrier(self.job.timeouts.backstop_s)  # a rank that leaves would end those that still write

    def _agreed(self, agreement: Agreement, done: int) -> tuple[bool, bool]:
        """Collective: whether some rank wished a step ago that all stop, or save. Also who was slow."""
        stop, save, *paces = agreement.tell([*self._wishes(), *self._watch.share()]) or (0.0, 0.0)
        for event in self._watch.hear(paces):
            self._telemetry.event({"step": done - 1, **event})
        return stop > 0, save > 0

    def _wishes(self) -> tuple[bool, bool]:
        """Stop? Save? Rank 0's clock speaks for all."""
        minutes = self.job.checkpoint.every_minutes
        overdue = minutes is not None and self.comm.world.rank == 0 and time.monotonic() - self._saved_at > 60 * minutes
        if overdue:
            self._saved_at = time.monotonic()  # wished once: all hear of it a step later
        return self.requests.stop, self.requests.checkpoint or overdue

    def _due(self, done: int, every: int | None) -> bool:
        """Every so many steps, and at the last one; never for 0 or None."""
        return every is not None and every > 0 and (done % every == 0 or done == self.schedule.steps)

    def _saved_and_evaluated(self, done: int, stop: bool, save: bool) -> tuple[Metrics, bool]:
        """Collective: what is due after a step; what was measured, and whether to stop: then the step is saved.

        What is to be saved is on disk before the evaluation, which may fail. A run that is asked to stop has no time for one: it is
        left out, or given up between two rounds, and made later only if it is the last.
        """
        evaluate = self._is_evaluation_due(done) and not stop
        due = stop or save or self._due(done, self.job.checkpoint.every_steps) or done == self.schedule.steps
        if due and self._saved_step != done:
            self._saved(done, {}, None, whole=evaluate)
        if not evaluate:
            return {}, stop
        metrics, stop = self._evaluated(done)
        best = self._better(metrics)
        if metrics if self._saved_step == done else best or stop:
            self._saved(done, metrics, best)
        return metrics, stop

    def _is_evaluation_due(self, done: int) -> bool:
        settings, epoch_steps = self.job.eval, self.schedule.epoch_steps
        by_epoch = settings.every_epochs is not None and done % (settings.every_epochs * epoch_steps) == 0
        return by_epoch or self._due(done, settings.every_steps) or done == self.schedule.steps

    def _evaluated(self, done: int) -> tuple[Metrics, bool]:
        """Collective: what was measured, and whether the evaluation was given up, for some rank was asked to stop."""
        self.comm.pulse.phase("evaluation", done)
        with self._clock.stopped(), self._watch.aside():
            try:
                metrics = self.evaluate()
            except Preempted:
                return {}, True
        if metrics:
            self._telemetry.event({"step": done, **metrics})
        return metrics, False

    def _saved(self, done: int, metrics: Metrics, best: tuple[str, float] | None, *, whole: bool = False) -> None:
        """Collective: the checkpoint of this step; where it is there already, what was measured since is noted in it.

        `whole`: it is on disk, and not only on its way, when this returns.
        """
        self.comm.pulse.phase("checkpoint", done)
        with self._clock.spent_on("checkpoint_s"), self._watch.aside():
            if self._saved_step != done:
                self._save(done, metrics, best)
            else:
                self.writer.note(done, metrics, best)
            if whole:
                self.writer.wait()
            # Together: a rank that still waits for the write before would else be late in the others' next step.
            self.comm.barrier(self.job.timeouts.backstop_s)

    def _better(self, metrics: Metrics) -> tuple[str, float] | None:
        """The metric that the job keeps the best checkpoint of, where its value is the best so far. The same answer on every rank."""
        name = self.job.checkpoint.best
        if name is None or not metrics:
            return None
        if self._best is None:
            best = files.best_so_far(self.run_folder.checkpoints) if self.comm.world.rank == 0 else None
            known = best is not None and best["metric"] == name  # an earlier start may have kept the best of another one
            self._best = float(self.comm.broadcast_object(best["value"] if best and known else -math.inf))
        value = float(metrics[name])
        if not value > self._best:
            return None
        self._best = value
        return name, value

    def _save(self, done: int, metrics: Metrics, best: tuple[str, float] | None) -> None:
        """Snapshot and write behind; on rank 0 also what the checkpoint says of itself."""
        self._note_written()
        about = self._about(done, metrics) if self.comm.world.rank == 0 else {}
        self.writer.save(done, self.train, about, best)
        self._saved_at, self._saved_step = time.monotonic(), done

    def _about(self, done: int, metrics: Metrics) -> dict[str, Any]:
        return {
            "model": self.job.model.name,
            "epoch": done // self.schedule.epoch_steps,
            "batch_in_epoch": done % self.schedule.epoch_steps,
            "samples": done * self.plan.global_batch_size,
            "data_samples": epoch_samples(self.source.shard_sizes(), self.weights),
            "world_size": self.comm.world.size,
            "metrics": dict(metrics),
            "versions": versions(),
            "job": self.job.model_dump(mode="json"),
        }

    def _note_written(self) -> None:
        for written in self.writer.pop_written():
            self._telemetry.event(asdict(written))

    def _global_batches(self, steps_done: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of each global batch from there on, on the device."""
        dtype = torch.float64 if self.job.model.precision == "fp64" else torch.float32
        feed = Feed(self.comm.device, dtype, self.clip.mean, self.clip.std)
        return feed.steps(self._batches(steps_done), self.plan.accumulation)

    def _batches(self, steps_done: int) -> Iterator[Batch]:
        """The rank's micro-batches up to the last step, as the loader gives them, with what was skipped noted."""
        epoch, batch = divmod(steps_done, self.schedule.epoch_steps)
        stream = train_batches(
            self.source,
            plan=self.plan,
            rank=self.comm.world.rank,
            seed=self.job.seed,
            window=self.job.data.shuffle_window,
            pixels=self.clip.crop,
            tokenizer=self.clip.tokenizer,
            workers=loader_processes(self.source, self.job.data.workers),
            weights=self.weights,
            skip_bad=self.job.data.on_bad_sample == "skip",
            start_epoch=epoch,
            start_batch=batch,
            pin_memory=self.comm.device.type == "cuda",
        )
        for micro_batch in islice(stream, (self.schedule.steps - steps_done) * self.plan.accumulation):
            self.skipped.note(len(micro_batch.keys), micro_batch.bad)
            yield micro_batch

    def _record(self, done: int, rate: float, result: StepResult) -> None:
        """Collective: what this step leaves, with the time of the steps since the last record."""
        size = self.plan.global_batch_size
        loss = float(self.comm.all_reduce(result.loss_share))
        lap = self._clock.pop(self._watch.pop_comm_s())
        times, about_ranks = lap.per_step(), self._ranks.look(done, lap)
        scale = float(self.clip.model.logit_scale.detach().exp())  # type: ignore[operator]
        epoch = (done - 1) // self.schedule.epoch_steps
        bad = int(self.comm.all_reduce(torch.tensor(float(self.skipped.count), device=self.comm.device)))
        self._telemetry.write(
            Record(done, epoch, done * size, loss, rate, float(result.grad_norm), scale, size / times["step_s"], **times, bad_samples=bad),
            about_ranks,
        )
