"""Monitors of one start of a run: times, slow ranks, profiles, gradients, bad samples and metrics."""

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.comm.protocol import Comm
from trainer.config.recovery import Health
from trainer.data.bad_samples import Skipped
from trainer.run import goodput_log
from trainer.run.layout import NON_FINITE
from trainer.safe_io.atomic import write_json
from trainer.telemetry.goodput_recorder import GoodputRecorder
from trainer.telemetry.metrics import Clock, Telemetry
from trainer.telemetry.profiler import Profiler
from trainer.telemetry.rank_stats import RankStats, StragglerDetector
from trainer.telemetry.writers import open_writers
from trainer.text.wording import many
from trainer.train.setup import TrainSetup
from trainer.train.step import StepResult
from trainer.world.rendezvous import Rendezvous

log = logging.getLogger("clipship")

_OTHERS_S = 30.0
"""Longest wait for the other ranks' samples, which a slow disk may delay."""


class NonFinite(RuntimeError):
    """Raised when a step's gradient is NaN or infinite; the text says where its samples are recorded."""


class NonFiniteGuard:
    """Checks the gradient of each step and counts skipped steps in a row, the same on all ranks."""

    def __init__(self, settings: Health, run_folder: Path, comm: Comm) -> None:
        self._settings, self._folder, self._comm = settings, run_folder / NON_FINITE, comm
        self._world = comm.world
        self._skipped = 0

    def check(self, step: int, result: StepResult, keys: Sequence[str]) -> None:
        """Checks one step's gradient; every rank calls it after every step.

        Raises NonFinite on all ranks alike.
        """
        if result.finite:
            self._skipped = 0
            return
        self._skipped += 1
        where = self._record(step, result, keys)
        what = f"the gradient of step {step} is NaN or infinite (its norm is {float(result.grad_norm):g})"
        ways = "A smaller optim.lr, a longer optim.warmup_steps or optim.grad_clip_norm may help"
        if self._settings.non_finite == "stop" and not result.scaled:
            self._await_others()
            raise NonFinite(
                f"{what}. Its samples are {where}. {ways}; health.non_finite = skip skips such steps."
            )
        if self._skipped >= self._settings.non_finite_in_a_row:
            self._await_others()
            raise NonFinite(
                f"{what}, like every gradient of the last {many(self._skipped, 'step')}. "
                f"Their samples are {where}. {ways}."
            )
        if self._world.rank == 0:
            log.warning("%-12s %s: step skipped, %d in a row", "not finite", what, self._skipped)

    def _await_others(self) -> None:
        """Collective: waits until all ranks have recorded their samples; the first to leave ends the others.

        A rank that has failed meanwhile, or is late, keeps no other from saying what it has found.
        """
        with suppress(RuntimeError, TimeoutError):
            self._comm.barrier(_OTHERS_S)

    def _record(self, step: int, result: StepResult, keys: Sequence[str]) -> str:
        """Writes the step's samples to the run folder; returns where they are.

        A full disk does not end the run.
        """
        # Of ranks that share a gradient, the one with a non-finite loss is where it came from.
        share = float(result.loss_share)
        about = {
            "step": step,
            "rank": self._world.rank,
            "node": self._world.node,
            "loss_share": share,
            "keys": list(keys),
        }
        try:
            self._folder.mkdir(exist_ok=True)
            write_json(self._folder / f"step-{step:08d}-rank-{self._world.rank:05d}.json", about)
        except OSError as error:
            log.warning("%-12s the samples of step %d are NOT WRITTEN: %s", "not finite", step, error)
            return f"not recorded ({error})"
        return f"in {self._folder}"


@dataclass(frozen=True)
class Monitors:
    """Objects that measure and record one start; the loop calls them around its steps."""

    skipped: Skipped
    clock: Clock
    stragglers: StragglerDetector
    rank_stats: RankStats
    profiler: Profiler
    non_finite: NonFiniteGuard
    telemetry: Telemetry
    goodput: GoodputRecorder

    def all_skipped(self, comm: Comm) -> Counter[str]:
        """Collective: returns how many samples the run's steps have skipped on all ranks, by cause."""
        own = comm.all_gather_object(self.skipped.of_steps)
        return sum(map(Counter, own), self.skipped.before)

    def summary(self) -> Mapping[str, object]:
        """Returns how this rank spent its time, and of the run, and which ranks were slow. Not collective."""
        return {
            **self.rank_stats.summary(),
            "slow_ranks": self.stragglers.slow_ranks,
            **self.goodput.summary(),
        }


@contextmanager
def open_monitors(setup: TrainSetup, skipped_before: Mapping[str, int] | None = None) -> Iterator[Monitors]:
    """Collective: opens the monitors of this start; its metric writers are closed when the block ends.

    `skipped_before` is what the stages of this start before this one have left in `Monitors.all_skipped`.
    """
    job, comm, folder, steps_done = setup.job, setup.comm, setup.run.folder, setup.start.steps_done
    before = setup.start.bad_samples if skipped_before is None else skipped_before
    skipped, clock = Skipped(job.data.max_bad_share, before), Clock()
    stragglers = StragglerDetector(job.health, comm)
    rank_stats = RankStats(comm, folder, steps_done)
    profiler = Profiler(job.comm.timeline, folder, comm)
    non_finite = NonFiniteGuard(job.health, folder, comm)
    with _open_telemetry(setup) as telemetry:
        goodput = _open_goodput(setup)
        yield Monitors(skipped, clock, stragglers, rank_stats, profiler, non_finite, telemetry, goodput)


def _open_goodput(setup: TrainSetup) -> GoodputRecorder:
    world, rendezvous = setup.comm.world, Rendezvous.from_env(os.environ)
    return GoodputRecorder(
        setup.run.folder if world.rank == 0 else None,
        start=rendezvous.start if rendezvous else "",
        generation=world.generation,
        ranks=world.size,
        from_step=setup.start.steps_done,
        began=goodput_log.began(os.environ, setup.started),
    )


def _open_telemetry(setup: TrainSetup) -> Telemetry:
    steps, steps_done = setup.schedule.last, setup.start.steps_done
    world = setup.comm.world
    if world.rank:
        return Telemetry(None, steps, steps_done)
    writers = open_writers(setup.job, setup.run.folder, steps_done)
    memory = setup.start.memory
    record = memory.record if memory is not None else None
    return Telemetry(setup.run.metrics, steps, steps_done, writers, world.generation, record)
