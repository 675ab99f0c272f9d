"""The training loop: next batch, step, log, save, evaluate.

One call of `run` is the whole training, from whatever step it starts at.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch

from trainer.checkpoint import files
from trainer.checkpoint.writer import Writer
from trainer.comm.consensus import StepConsensus
from trainer.comm.protocol import Comm
from trainer.comm.replicas import check_replicas
from trainer.config import Job
from trainer.config.batch_plan import BatchPlan, Schedule
from trainer.config.loader import recorded
from trainer.data.bad_samples import Skipped
from trainer.data.loader import Batch, train_batches
from trainer.data.order import epoch_samples
from trainer.data.source import Source
from trainer.data.streams import loader_processes
from trainer.errors import Preempted
from trainer.model.build import Clip
from trainer.model.optimizer import learning_rate, set_learning_rate
from trainer.run.layout import Run
from trainer.sysinfo.versions import versions
from trainer.telemetry.metrics import Clock, Telemetry
from trainer.telemetry.profiler import Profiler
from trainer.telemetry.rank_stats import RankStats
from trainer.telemetry.records import Record
from trainer.telemetry.stragglers import StragglerDetector
from trainer.telemetry.writers import open_writers
from trainer.train.non_finite import NonFiniteGuard
from trainer.train.prefetch import Prefetcher
from trainer.train.requests import Requests
from trainer.train.step import MicroBatch, StepResult, TrainStep

Metrics = Mapping[str, float | int]


@dataclass
class Loop:
    """Training loop: takes the next batch, steps, logs, saves and evaluates until the schedule ends."""

    job: Job
    comm: Comm
    run_folder: Run
    plan: BatchPlan
    schedule: Schedule
    clip: Clip
    train: TrainStep
    source: Source
    weights: Sequence[float] | None
    """Weight of each shard: how many times an epoch contains its samples."""
    evaluate: Callable[[], Metrics]
    """Collective: returns the metrics that the job asks for, of the model as it is now.

    Raises Preempted on every rank if one was asked to stop meanwhile.
    """
    writer: Writer
    requests: Requests

    def run(self, steps_done: int) -> Metrics:
        """Collective: runs the remaining steps; returns the final evaluation's metrics.

        If asked to stop, it saves a checkpoint and raises Preempted.
        """
        self.skipped = Skipped(self.job.data.max_bad_share)
        batches = self._global_batches(steps_done)
        consensus = StepConsensus(self.comm)
        self._saved_at = time.monotonic()
        self._saved_step = steps_done
        self._best: float | None = None
        self._clock = Clock()
        self._stragglers = StragglerDetector(self.job.health, self.comm)
        self._rank_stats = RankStats(self.comm, self.run_folder.folder, steps_done)
        self._profiler = Profiler(self.job.comm.timeline, self.run_folder.folder, self.comm)
        self._non_finite = NonFiniteGuard(self.job.health, self.run_folder.folder, self.comm.world)
        self.clip.model.train()
        with self._open_telemetry(steps_done) as self._telemetry:
            # This phase includes the first batch, since the loaders start.
            self.comm.heartbeat.begin_phase("first step", steps_done + 1)
            metrics: Metrics = {}
            stop = False
            for done in range(steps_done + 1, self.schedule.steps + 1):
                stop, save = self._agreed(consensus, done)
                rate = learning_rate(self.job.optim, done - 1, self.schedule.steps)
                result = self._traced_step(batches, done, rate, first=done == steps_done + 1)
                if self._due(done, self.job.logging.every_steps) or done == steps_done + 1:
                    self._record(done, rate, result)
                if self._due(done, self.job.comm.check_replicas_steps):
                    check_replicas(self.comm, self.clip.model, self.train.optimizer)
                metrics, stop = self._saved_and_evaluated(done, stop, save)
                if stop:
                    break
            # This start has no step left: the run was killed or stopped between the last checkpoint and the
            # result.
            if steps_done == self.schedule.steps:
                metrics, stop = self._saved_and_evaluated(steps_done, stop=False, save=False)
            self._close(consensus)
            if stop:
                raise Preempted(
                    f"asked to stop: step {self._saved_step} of {self.schedule.steps} is saved, "
                    "and the run can go on"
                )
        return metrics

    def summary(self) -> Mapping[str, object]:
        """Returns how rank 0 spent its time and which ranks were slow.

        Not collective; call it after `run`.
        """
        return {**self._rank_stats.summary(), "slow_ranks": self._stragglers.slow_ranks}

    def _traced_step(
        self, batches: Iterator[list[MicroBatch]], done: int, rate: float, *, first: bool
    ) -> StepResult:
        """Collective: runs one step and traces it if the job asks for that.

        Time spent on tracing counts for no step.
        """
        with self._clock.stopped():
            self._profiler.begin(done)
        result = self._step(batches, done, rate, first=first)
        with self._clock.stopped():
            self._profiler.end(done)
        return result

    def _step(
        self, batches: Iterator[list[MicroBatch]], done: int, rate: float, *, first: bool
    ) -> StepResult:
        """Collective: fetches the data of one step and runs it.

        The first step of a start has one time limit for data and computation together.
        """
        with self._stragglers.step():
            if not first:
                self.comm.heartbeat.begin_phase("data", done)
            with self._clock.spent_on("data_s"):
                micro = next(batches)
            if not first:
                self.comm.heartbeat.begin_phase("step", done)
            set_learning_rate(self.train.optimizer, rate)
            result = self.train(micro, done - 1)
        self._clock.step_done()
        self._non_finite.check(done, result, [key for batch in micro for key in batch.keys])
        return result

    def _open_telemetry(self, steps_done: int) -> Telemetry:
        if self.comm.world.rank:
            return Telemetry(None, self.schedule.steps, steps_done)
        sinks = open_writers(self.job, self.run_folder.folder, steps_done)
        return Telemetry(self.run_folder.metrics, self.schedule.steps, steps_done, sinks)

    def _close(self, consensus: StepConsensus) -> None:
        """Collective: ends all that is under way and waits until the last checkpoint is complete."""
        self.comm.heartbeat.begin_phase("checkpoint", self.schedule.steps)
        consensus.close()
        self._profiler.close()
        self.writer.finish()
        self._note_written()
        # A rank that leaves earlier would end those that still write.
        self.comm.barrier(self.job.timeouts.backstop_s)

    def _agreed(self, consensus: StepConsensus, done: int) -> tuple[bool, bool]:
        """Returns whether some rank asked, a step ago, to stop and to save; also records slow ranks.

        Collective.
        """
        stop, save, *paces = consensus.exchange([*self._wishes(), *self._stragglers.contribution()]) or (
            0.0,
            0.0,
        )
        for event in self._stragglers.receive(paces):
            self._telemetry.event({"step": done - 1, **event})
        return stop > 0, save > 0

    def _wishes(self) -> tuple[bool, bool]:
        """Returns this rank's requests: (stop, save).

        Only rank 0's clock decides when a timed checkpoint is due.
        """
        minutes = self.job.checkpoint.every_minutes
        overdue = (
            minutes is not None
            and self.comm.world.rank == 0
            and time.monotonic() - self._saved_at > 60 * minutes
        )
        if overdue:
            self._saved_at = time.monotonic()  # it asks only once: all ranks receive it a step later
        return self.requests.stop, self.requests.checkpoint or overdue

    def _due(self, done: int, every: int | None) -> bool:
        """Returns whether step `done` is a multiple of `every`, or the last.

        Always False if `every` is 0 or None.
        """
        return every is not None and every > 0 and (done % every == 0 or done == self.schedule.steps)

    def _saved_and_evaluated(self, done: int, stop: bool, save: bool) -> tuple[Metrics, bool]:
        """Collective: saves and evaluates after a step if due; returns the metrics and whether to stop.

        A checkpoint that is due is on disk before the evaluation, which may fail. A run that is asked to stop
        has no time for an evaluation: it is skipped, or given up between two rounds, and made in the next
        start only if it is the last.
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
        """Collective: evaluates; returns the metrics and whether a request to stop ended the evaluation."""
        self.comm.heartbeat.begin_phase("evaluation", done)
        with self._clock.stopped(), self._stragglers.aside():
            try:
                metrics = self.evaluate()
            except Preempted:
                return {}, True
        if metrics:
            self._telemetry.event({"step": done, **metrics})
        return metrics, False

    def _saved(
        self, done: int, metrics: Metrics, best: tuple[str, float] | None, *, whole: bool = False
    ) -> None:
        """Collective: saves a checkpoint of this step, or adds the metrics and `best` to it if it is saved.

        With `whole`, the checkpoint is on disk when this returns; otherwise it may still be on its way.
        """
        self.comm.heartbeat.begin_phase("checkpoint", done)
        with self._clock.spent_on("checkpoint_s"), self._stragglers.aside():
            if self._saved_step != done:
                self._save(done, metrics, best)
            else:
                self.writer.note(done, metrics, best)
            if whole:
                self.writer.wait()
            # All ranks wait here: one that still waits for the previous write would otherwise be late in the
            # others' next step.
            self.comm.barrier(self.job.timeouts.backstop_s)

    def _better(self, metrics: Metrics) -> tuple[str, float] | None:
        """Returns name and value of the metric `checkpoint.best` if it is the best so far, else None.

        The answer is the same on every rank.
        """
        name = self.job.checkpoint.best
        if name is None or not metrics:
            return None
        if self._best is None:
            best = files.best_so_far(self.run_folder.checkpoints) if self.comm.world.rank == 0 else None
            # An earlier start may have kept the best of another metric.
            known = best is not None and best["metric"] == name
            self._best = float(self.comm.broadcast_object(best["value"] if best and known else -math.inf))
        value = float(metrics[name])
        if not value > self._best:
            return None
        self._best = value
        return name, value

    def _save(self, done: int, metrics: Metrics, best: tuple[str, float] | None) -> None:
        """Takes a snapshot and writes it in the background; on rank 0 also the checkpoint's description."""
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
            "job": recorded(self.job),
        }

    def _note_written(self) -> None:
        for written in self.writer.pop_written():
            self._telemetry.event(asdict(written))

    def _global_batches(self, steps_done: int) -> Iterator[list[MicroBatch]]:
        """Yields this rank's micro-batches of each global batch after `steps_done`, on the device."""
        dtype = torch.float64 if self.job.model.precision == "fp64" else torch.float32
        prefetcher = Prefetcher(self.comm.device, dtype, self.clip.mean, self.clip.std)
        return prefetcher.steps(self._batches(steps_done), self.plan.accumulation)

    def _batches(self, steps_done: int) -> Iterator[Batch]:
        """Yields this rank's micro-batches as the loader gives them, and counts skipped samples."""
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
            self.skipped.record(len(micro_batch.keys), micro_batch.bad)
            yield micro_batch

    def _record(self, done: int, rate: float, result: StepResult) -> None:
        """Collective: writes the metrics of this step, with the times of the steps since the last record."""
        size = self.plan.global_batch_size
        loss = float(self.comm.all_reduce(result.loss_share))
        lap = self._clock.pop(self._stragglers.pop_comm_s())
        times, about_ranks = lap.per_step(), self._rank_stats.gather(done, lap)
        scale = float(self.clip.model.logit_scale.detach().exp())  # type: ignore[operator]
        epoch = (done - 1) // self.schedule.epoch_steps
        bad = int(self.comm.all_reduce(torch.tensor(float(self.skipped.count), device=self.comm.device)))
        self._telemetry.write(
            Record(
                done,
                epoch,
                done * size,
                loss,
                rate,
                float(result.grad_norm),
                scale,
                size / times["step_s"],
                **times,
                bad_samples=bad,
            ),
            about_ranks,
        )
