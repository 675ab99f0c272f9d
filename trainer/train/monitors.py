"""Monitors of one start of a run: times, slow ranks, profiles, gradients, bad samples and metrics."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from trainer.comm.protocol import Comm
from trainer.data.bad_samples import Skipped
from trainer.run import goodput_log
from trainer.telemetry.goodput_recorder import GoodputRecorder
from trainer.telemetry.metrics import Clock, Telemetry
from trainer.telemetry.profiler import Profiler
from trainer.telemetry.rank_stats import RankStats
from trainer.telemetry.stragglers import StragglerDetector
from trainer.telemetry.writers import open_writers
from trainer.train.non_finite import NonFiniteGuard
from trainer.train.setup import TrainSetup
from trainer.world.rendezvous import Rendezvous


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
