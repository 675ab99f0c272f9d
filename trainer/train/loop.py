"""The training loop: next batch, step, log, save, evaluate.

One call of `run` is the whole training, from whatever step it starts at.
"""

import base64
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.comm.accelerator import on_accelerator
from trainer.comm.protocol import Comm
from trainer.comm.replicas import check_replicas
from trainer.config.formats import FORMATS
from trainer.config.learning_rate import learning_rate
from trainer.copies.copier import STOPPED_WAIT_S
from trainer.data.bad_samples import ALONE, TRANSPARENT
from trainer.data.reading import TALLY, of_record
from trainer.errors import Preempted
from trainer.evaluate.rounds import EvaluationFailed
from trainer.model.optimizer import set_learning_rate
from trainer.report.board import BOARD_FILE, read_rows
from trainer.safe_io.plain import read_json
from trainer.sysinfo.versions import versions
from trainer.telemetry.metrics import evaluation_of
from trainer.telemetry.pictures import Picture
from trainer.telemetry.records import Lap, Record
from trainer.train.checkpoint_policy import CheckpointPolicy, Metrics, is_due
from trainer.train.keep_in_memory import summary_of
from trainer.train.monitors import Monitors
from trainer.train.prefetch import Awaited, global_batches
from trainer.train.result import TrainResult
from trainer.train.setup import TrainSetup
from trainer.train.step import StepResult

log = logging.getLogger("clipship")

_PACE_STEPS = 50
"""Steps that decide, after those of the first record."""
_WAITED = 0.02
"""Share of the time that a host which is ahead of its GPU waits for it at least."""
_DATA = 0.3
"""Share of the time beyond which the GPU waits for data: to pack and to send them is the host's work, too."""


class HostPace:
    """Measures how long the host waits for the GPU, and speaks once at most.

    The host reads how a step ended when the next one is under way. If the answer is always there already, the
    GPU was done before the host had given it more.
    """

    def __init__(self, *, advises: bool) -> None:
        """`advises` is true on one rank of a job that `model.cuda_graphs` would help."""
        self._advises = advises
        self._waited_s = 0.0
        self._known: Lap | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the block as the host's wait for the GPU."""
        start = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - start

    def record(self, lap: Lap, elsewhere_s: float) -> None:
        """Takes the times of the steps since the last record, and decides when there are enough.

        `elsewhere_s` are the seconds of all steps in which the host may have waited for the GPU elsewhere.
        """
        if self._known is None:  # the first steps of a start tell nothing of the others
            self._known, self._waited_s = Lap(), -elsewhere_s
            return
        self._known += lap
        if not self._advises or self._known.steps < _PACE_STEPS:
            return
        self._advises = False
        whole_s = self._known.steps * self._known.per_step()["step_s"]
        if self._waited_s + elsewhere_s < _WAITED * whole_s and self._known.data_s < _DATA * whole_s:
            log.info(
                "%-12s the GPU waits for the host, which needs %.1f ms for a step: model.cuda_graphs = true "
                "spares most of that, and a larger batch gives the GPU more to do",
                "speed",
                1e3 * whole_s / self._known.steps,
            )


class LateReads:
    """Actions that need a step's values on the host, in the order in which they were added.

    On a GPU they run one step later. By then it has the next step to do, so it is never idle for the host's
    sake, and the host is never more than one step ahead of it. All ranks read the same values at the same
    step.
    """

    def __init__(self, *, late: bool) -> None:
        """`late` is true for a GPU; on the CPU each action runs as soon as it is added."""
        self._late = late
        self._waiting: list[Callable[[], None]] = []

    def add(self, action: Callable[[], None]) -> None:
        """Runs the action at the next `settle`."""
        if self._late:
            self._waiting.append(action)
        else:
            action()

    def settle(self) -> None:
        """Runs the waiting actions; those after one that raises are dropped.

        Call it when the next step is under way, and before anything that needs to know how the last step
        ended.
        """
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()


class StepConsensus:
    """Adds up a few numbers of each rank once a step.

    A request is 1 or 0, so a sum above 0 means that at least one rank made the request.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._pending: Callable[[], Tensor] | None = None

    def exchange(self, numbers: Sequence[float]) -> list[float]:
        """Sends this rank's numbers; returns the sums of the previous step's numbers, the same on every rank.

        Collective, once a step. The first call returns an empty list. The sums travel while the step
        computes, so receiving them costs no waiting.
        """
        sums: list[float] = self._pending().tolist() if self._pending else []
        self._pending = self._comm.start_all_reduce(torch.tensor(numbers, dtype=torch.float32))
        return sums

    def close(self) -> None:
        """Collective: receives the last sums, so that no message is left under way."""
        if self._pending is not None:
            self._pending()
            self._pending = None


class _Void(Exception):
    """Raised on all ranks alike after a step for which some rank had no batch."""

    def __init__(self, step: int, skipped: Counter[str]) -> None:
        """`skipped` counts the samples that this rank had skipped before the step."""
        self.steps_done, self.skipped = step - 1, skipped


class Loop:
    """Training loop: takes the next batch, steps, logs, saves and evaluates until the schedule ends."""

    def __init__(self, setup: TrainSetup, monitors: Monitors, policy: CheckpointPolicy) -> None:
        """`policy` begins at the step that `setup.start` has reached."""
        self._setup, self._monitors, self._policy = setup, monitors, policy
        self._job, self._comm = setup.job, setup.comm
        self._schedule = setup.schedule
        self._steps_done, self._steps = setup.start.steps_done, setup.schedule.steps
        self._consensus = StepConsensus(setup.comm)
        self._loaded = Awaited(setup)
        self._batches = global_batches(setup, monitors.skipped, self._loaded)
        self._reads = LateReads(late=on_accelerator(setup.comm.device))
        self._pace = HostPace(advises=setup.comm.world.rank == 0 and setup.train_step.would_replay)
        data = self._job.data
        self._reads_files = bool(FORMATS[data.kind].unit) and not data.streams
        self._record_of_step: Future[Mapping[str, object]] = Future()
        self._failure: str | None = None
        """Why the last evaluation has no metrics, if it failed."""

    def run(self) -> TrainResult:
        """Collective, once: runs the remaining steps and evaluations; returns how training ended.

        If asked to stop, it saves a checkpoint and returns before the schedule ends.
        """
        self._setup.clip.model.train()
        monitors, done, first = self._monitors, self._steps_done, self._steps_done + 1
        metrics, stop = self._finish_step_of_memory()
        # This phase includes the first batch, since the loaders start.
        self._comm.heartbeat.begin_phase("first step", first)
        try:
            for step in range(first, self._steps + 1) if not stop else ():
                metrics, stop = self._step(step)
                done = step
                if stop:
                    break
        except _Void as void:
            self._record_of_step.cancel()  # who keeps the step in memory waits for it
            monitors.skipped.of_steps = void.skipped
            done, stop = void.steps_done, True
            self._save_and_evaluate(done, stop=True, save=False)
        # This start has no step left: the run was killed or stopped between the last checkpoint and the
        # result.
        if self._steps_done == self._steps and self._setup.start.memory is None:
            metrics, stop = self._save_and_evaluate(
                self._steps, stop=False, save=False, known=self._evaluated(self._steps)
            )
        copies = self._close(done, stop)
        return TrainResult(
            steps=self._schedule.last,
            saved_step=self._policy.saved_step,
            stopped=stop,
            metrics=metrics,
            evaluation_failed=self._failure,
            bad_samples=monitors.all_skipped(self._comm),
            summary={**monitors.summary(), **summary_of(self._setup.keeper), **copies},
        )

    def _step(self, step: int) -> tuple[Metrics, bool]:
        """Collective: runs one step and what is due after it; returns metrics and whether to stop."""
        stop, save = self._requests_of_all(step)
        rate = learning_rate(self._job.optim, self._schedule.own(step) - 1, self._schedule.own_steps)
        result = self._traced_step(step, rate)
        is_logged = step == self._steps_done + 1 or self._is_due(step, self._job.logging.every_steps)
        record = self._record_of_step = self._record(step, rate, result) if is_logged else self._known()
        if (keeper := self._setup.keeper) is not None:
            keeper.keep(step, record, self._monitors.skipped.of_steps, self._monitors.skipped.before)
        if self._is_due(step, self._job.comm.check_replicas_steps):
            check_replicas(self._comm, self._setup.train_step.shards, self._setup.train_step.optimizer)
        return self._save_and_evaluate(step, stop, save)

    def _finish_step_of_memory(self) -> tuple[Metrics, bool]:
        """Collective: does what was due after a step that comes from memory and was not done any more.

        Its checkpoint may not be complete, and its evaluation may not have ended. One that metrics.jsonl has
        is not made again.
        """
        if self._setup.start.memory is None:
            return {}, False
        step = self._steps_done
        known = self._evaluated(step)
        return self._save_and_evaluate(step, stop=False, save=self._policy.missed(step), known=known)

    def _evaluated(self, step: int) -> Metrics | None:
        """Collective: returns the metrics that metrics.jsonl has of a step; None if it has none."""
        is_first = self._comm.world.rank == 0
        metrics: Metrics | None = self._comm.broadcast_object(
            evaluation_of(self._setup.run.metrics, step) if is_first else None
        )
        return metrics

    def _is_due(self, step: int, every: int | None) -> bool:
        return is_due(step, every, self._steps)

    def _requests_of_all(self, step: int) -> tuple[bool, bool]:
        """Returns whether some rank asked, a step ago, to stop and to save; also records slow ranks.

        Collective.
        """
        stragglers = self._monitors.stragglers
        keeper = self._setup.keeper
        cost = (keeper.own_need,) if keeper is not None else ()
        sums = self._consensus.exchange([*self._own_requests(), *cost, *stragglers.contribution()])
        stop, save, *paces = sums or (0.0, 0.0)
        if keeper is not None and paces:
            keeper.receive(paces.pop(0), self._comm.world.size)
        for event in stragglers.receive(paces):
            self._monitors.telemetry.event({"step": step - 1, **event})
        return stop > 0, save > 0

    def _own_requests(self) -> tuple[bool, bool]:
        """Returns this rank's requests: (stop, save).

        Only rank 0's clock decides when a timed checkpoint is due.
        """
        overdue = self._comm.world.rank == 0 and self._policy.pop_overdue()
        requests = self._setup.requests
        return requests.stop, requests.checkpoint or overdue

    def _traced_step(self, step: int, rate: float) -> StepResult:
        """Collective: runs one step and traces it if the job asks for that.

        Time spent on tracing counts for no step.
        """
        clock, profiler = self._monitors.clock, self._monitors.profiler
        with clock.stopped():
            profiler.begin(step)
        result = self._run_step(step, rate)
        if profiler.active:  # to write a trace takes long
            self._comm.heartbeat.use_configured_limit()
        with clock.stopped():
            profiler.end(step)
        return result

    def _run_step(self, step: int, rate: float) -> StepResult:
        """Collective: fetches the data of one step and runs it.

        The first step of a start has one time limit for data and computation together.
        """
        clock, train_step = self._monitors.clock, self._setup.train_step
        is_first = step == self._steps_done + 1
        skipped = self._monitors.skipped.of_steps
        with self._monitors.stragglers.step():
            if not is_first:
                self._comm.heartbeat.begin_phase("data", step)
            with clock.spent_on("data_s"):
                batches = next(self._batches)
            if not is_first:
                self._comm.heartbeat.begin_phase("step", step)
            set_learning_rate(train_step.optimizer, rate)
            result = train_step(batches, self._schedule.own(step) - 1, void=self._loaded.missing)
            if is_first:  # from now on there is something to save
                self._comm.heartbeat.begin_phase("step", step)
                self._setup.writer.reserve(train_step)
            with self._pace.waiting():
                self._reads.settle()  # the step before this one
        clock.step_done()
        values, keys = result.on_host(), [key for batch in batches for key in batch.keys]
        self._reads.add(lambda: self._check(step, values(), keys, skipped))
        return result

    def _check(self, step: int, result: StepResult, keys: Sequence[str], skipped: Counter[str]) -> None:
        """Collective: judges a step's gradient. Raises _Void if it is that of a void step."""
        if not result.finite and any(missing := self._comm.all_gather_object(self._loaded.missing)):
            if self._comm.world.rank == 0:
                text = "%-12s storage has given rank %d no batch for step %d: it is left out"
                log.warning(text, "data", missing.index(True), step)
            raise _Void(step, skipped)
        self._monitors.non_finite.check(step, result, keys)

    def _known(self) -> "Future[Mapping[str, object]]":
        """Returns a future without values, which is done when the gradient of the last step is known.

        It is never done if that ends the run.
        """
        known: Future[Mapping[str, object]] = Future()
        self._reads.add(lambda: known.set_result({}))
        return known

    def _record(self, step: int, rate: float, result: StepResult) -> "Future[Mapping[str, object]]":
        """Collective: sends the metrics of this step, with the times of the steps since the last record.

        They are written when they are read. The future then has the values that are written.
        """
        written: Future[Mapping[str, object]] = Future()
        monitors, setup = self._monitors, self._setup
        lap = monitors.clock.pop(monitors.stragglers.pop_comm_s())
        self._pace.record(lap, setup.train_step.waited_s)
        times, epoch = lap.per_step(), (self._schedule.own(step) - 1) // self._schedule.epoch_steps
        scale = setup.clip.model.get_parameter("logit_scale").detach().exp()
        counts = {**monitors.skipped.figures, **(TALLY.pop().figures if self._reads_files else {})}
        about_ranks = monitors.rank_stats.gather(
            step, lap, counts, [result.loss_share, result.grad_norm, scale]
        )

        def write() -> None:
            figures, totals, rows = about_ranks()
            goodput = monitors.goodput.steps(step, lap, figures["data_s_median"], figures["straggler_s"])
            _, grad_norm, logit_scale = rows[self._comm.world.rank]
            record = Record(
                step,
                epoch,
                setup.samples_after(step),
                sum(loss_share for loss_share, _, _ in rows),
                rate,
                grad_norm,
                logit_scale,
                setup.plan.global_batch_size / times["step_s"],
                **times,
                bad_samples=int(totals["bad_samples"]) + monitors.skipped.before.total(),
            )
            copies = self._setup.copier.figures() if self._setup.copier is not None else {}
            known = {name: int(totals[name]) for name in (ALONE, TRANSPARENT) if totals[name]}
            about_all = {**figures, **of_record(totals), **known, **goodput, **copies}
            written.set_result(monitors.telemetry.write(record, about_all))

        self._reads.add(write)
        return written

    def _save_and_evaluate(
        self, step: int, stop: bool, save: bool, known: Metrics | None = None
    ) -> tuple[Metrics, bool]:
        """Collective: saves and evaluates after a step if due; returns the metrics and whether to stop.

        `known` are the step's metrics if it has been evaluated already.

        A checkpoint that is due is on disk before the evaluation, which may fail. An evaluation that a stop
        leaves out, or ends between two rounds, is made in the next start only if it is the last.
        """
        due = self._policy.after_step(step, stop=stop, save=save)
        if due.save or due.evaluate:
            self._reads.settle()  # no checkpoint of a step that may not count
        if due.save:
            with self._saving(step):
                self._save(step, {}, None)
                if due.evaluate:
                    self._setup.writer.wait()
        if not due.evaluate:
            return {}, stop
        metrics, stop = (known, stop) if known else self._evaluate(step)
        then = self._policy.after_evaluation(step, metrics, stop=stop)
        if then.save:
            with self._saving(step):
                self._save(step, metrics, then.best)
        elif then.record:
            with self._saving(step):
                self._setup.writer.record(step, metrics, then.best)
        return metrics, stop

    def _evaluate(self, step: int) -> tuple[Metrics, bool]:
        """Collective: evaluates; returns the metrics and whether a request to stop ended the evaluation."""
        self._comm.heartbeat.begin_phase("evaluation", step)
        monitors = self._monitors
        with monitors.clock.stopped(), monitors.stragglers.aside(), monitors.goodput.evaluating(step):
            try:
                metrics = self._setup.evaluate()
            except Preempted:
                return {}, True
            except EvaluationFailed as problem:
                self._go_on_without(step, problem)
                return {}, False
            if self._job.eval.retrieval and self._comm.world.rank == 0:
                monitors.telemetry.show(step, eval_pictures(self._setup.run.folder))
        self._failure = None
        if metrics:
            monitors.telemetry.event({"step": step, **metrics})
        return metrics, False

    def _go_on_without(self, step: int, problem: EvaluationFailed) -> None:
        """Reports an evaluation that failed. Raises its problem if the job says that it ends the run."""
        if self._job.eval.on_failure == "stop":
            raise problem
        self._failure = str(problem)
        if self._comm.world.rank == 0:
            log.warning(
                "%-12s step %d is NOT EVALUATED, and the run goes on: %s", "evaluation", step, problem
            )
        self._monitors.telemetry.event({"step": step, "evaluation_failed": self._failure})

    @contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        """Collective: accounts for a block that saves a checkpoint or adds to one; then waits for all ranks.

        Without the wait, a rank that still waits for the previous write would be late in the others' next
        step.
        """
        self._comm.heartbeat.begin_phase("checkpoint", step)
        with self._monitors.clock.spent_on("checkpoint_s"), self._monitors.stragglers.aside():
            yield
            self._comm.barrier(self._job.timeouts.backstop_s)

    def _save(self, step: int, metrics: Metrics, best: tuple[str, float] | None) -> None:
        """Takes a snapshot and writes it in the background; on rank 0 also the checkpoint's description."""
        self._report_written()
        skipped = self._monitors.all_skipped(self._comm)
        about = self._describe(step, metrics, skipped) if self._comm.world.rank == 0 else {}
        self._setup.writer.save(step, self._setup.train_step, about, best)
        self._monitors.goodput.save(step)
        self._policy.saved(step)

    def _describe(self, step: int, metrics: Metrics, skipped: Mapping[str, int]) -> dict[str, Any]:
        """Returns what the manifest of a step's checkpoint says besides its files."""
        setup = self._setup
        return {
            "model": self._job.model.name,
            "epoch": self._schedule.own(step) // self._schedule.epoch_steps,
            "batch_in_epoch": self._schedule.own(step) % self._schedule.epoch_steps,
            "samples": setup.samples_after(step),
            "bad_samples": dict(skipped),
            "world_size": self._comm.world.size,
            "metrics": dict(metrics),
            "versions": versions(),
            **setup.identity.facts(),
        }

    def _report_written(self) -> None:
        """Writes the cost of each checkpoint that is complete since the last call into metrics.jsonl."""
        for written in self._setup.writer.pop_written():
            self._monitors.telemetry.event(asdict(written))

    def _close(self, done: int, stop: bool) -> Mapping[str, object]:
        """Collective: ends all that is under way and waits until the last checkpoint is complete and copied.

        `done` is the last step. Returns what the result says of the copies.
        """
        self._reads.settle()
        self._comm.heartbeat.begin_phase("checkpoint", done)
        self._consensus.close()
        monitors = self._monitors
        monitors.profiler.close()
        with monitors.clock.spent_on("checkpoint_s"):
            self._setup.writer.finish()
        if self._setup.keeper is not None:
            self._setup.keeper.close()
        self._report_written()
        with monitors.clock.spent_on("checkpoint_s"):
            copies = self._finish_copies(stop)
        # A rank that leaves earlier would end those that still write.
        self._comm.barrier(self._job.timeouts.backstop_s)
        monitors.goodput.close(self._policy.saved_step, monitors.clock.pop(monitors.stragglers.pop_comm_s()))
        return copies

    def _finish_copies(self, stop: bool) -> Mapping[str, object]:
        """Waits for the run's last copy, within the limit of this phase, and shortly if it has to stop."""
        if self._setup.copier is None or not (stop or self._schedule.ends_run):
            return {}
        self._comm.heartbeat.use_configured_limit()
        longest_s = min(self._job.checkpoint.copy_wait_s, 0.75 * self._comm.heartbeat.remaining_s)
        return self._setup.copier.finish(min(longest_s, STOPPED_WAIT_S) if stop else longest_s)


_PICTURES = 8


def eval_pictures(run_folder: Path) -> list[Picture]:
    """Returns the first pictures of the retrieval board; empty if there is none, or none that can be read."""
    try:
        entries = read_json(run_folder / BOARD_FILE)
    except (OSError, ValueError):
        return []
    return [
        Picture(
            base64.b64decode(row.image), row.caption, row.place, [(text.text, text.own) for text in row.texts]
        )
        for row in read_rows(entries if isinstance(entries, list) else [])[:_PICTURES]
    ]
