"""Simulated world of ranks in which steps vary and pause, for `benchmarks.hang`; a simulated clock, no torch.

Each rank learns its own limits with the code of real ranks. A step of a rank is: wait for data, then its own
work, then wait in a collective until the slowest rank is there.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from trainer.config import Timeouts
from trainer.supervise.coordinate.diagnosis import late_ranks
from trainer.supervise.rank.rank_report import RankReport
from trainer.supervise.supervisor import TICK_S
from trainer.world.learned_limits import WAIT, LimitLearner

CEILINGS = Timeouts().by_phase

Work = Callable[[random.Random, int, int], tuple[float, float]]
"""Seconds of data and of own work of a rank at a step, given the draw, the rank and the step."""


@dataclass(frozen=True)
class Pause:
    """Pause of some ranks for some steps.

    Every `every` steps on average, it lasts up to `steps` steps; each of these is `factor` times as long, and
    its work and its data take up to so many seconds more.
    """

    every: int
    steps: int = 1
    factor: float = 1.0
    work_s: float = 0.0
    data_s: float = 0.0
    everywhere: bool = False


PAUSES = {
    "garbage collection": Pause(every=300, work_s=1.5),
    "slow storage": Pause(every=2000, data_s=6.0),
    "storage slow for all": Pause(every=10_000, steps=20, data_s=2.0, everywhere=True),
    "thermal drop": Pause(every=5000, steps=400, factor=2.5),
    "writing a checkpoint": Pause(every=500, steps=10, factor=1.8, everywhere=True),
    "after an evaluation": Pause(every=1000, work_s=3.0, data_s=2.0, everywhere=True),
}


@dataclass
class Outcome:
    """Result of one simulation."""

    steps: int = 0
    false_alarms: int = 0
    named_s: list[float] = field(default_factory=list)
    """Seconds from each stop of a rank until it would be named."""
    limit_s: list[float] = field(default_factory=list)
    """Limit of a step that held at each stop."""
    usual_s: list[float] = field(default_factory=list)
    """Seconds that 99 % of the last 1,000 steps took at each stop."""
    wrong: int = 0
    """Stops at which another rank was named."""
    not_learned: int = 0
    """Stops before enough was learned."""
    spare_s: float = math.inf
    """Fewest seconds by which any phase of any step could have been longer without a false alarm."""


class World:
    """Ranks with their learners; `step` runs one step of all."""

    def __init__(self, ranks: int, work: Work, seed: int, pauses: Sequence[Pause], period: int = 10) -> None:
        self._work, self._draw = work, random.Random(seed)
        self._learners = [LimitLearner(CEILINGS, period, ranks) for _ in range(ranks)]
        self._pauses = pauses
        self._until: dict[tuple[int, int], int] = {}
        """Step at which a pause ends, by the pause's number and the rank."""

    def step(self, number: int, outcome: Outcome, *, stop: bool = False) -> None:
        """Runs one step; with `stop`, first asks when a rank that stops in it would be named."""
        own = [self._own(rank, number) for rank in range(len(self._learners))]
        ready = [data + work for data, work in own]
        end = max(ready)
        if stop:
            self._stop(ready, [data for data, _ in own], outcome)
        for learner, (data_s, work_s) in zip(self._learners, own, strict=True):
            wait_s = end - data_s - work_s
            spare_s = min(
                learner.limit("data").seconds - data_s,
                learner.limit("step").seconds - (end - data_s),
                learner.limit(WAIT).seconds - wait_s,
            )
            outcome.false_alarms += spare_s < 0
            outcome.spare_s = min(outcome.spare_s, spare_s)
            learner.record("data", data_s)
            learner.record("step", end - data_s)
            learner.record(WAIT, wait_s)
        outcome.steps += 1

    def _own(self, rank: int, number: int) -> tuple[float, float]:
        data_s, work_s = self._work(self._draw, rank, number)
        for pause in self._active(rank, number):
            work_s = work_s * pause.factor + pause.work_s * self._draw.random()
            data_s += pause.data_s * self._draw.random()
        return data_s, work_s

    def _active(self, rank: int, number: int) -> Iterator[Pause]:
        for index, pause in enumerate(self._pauses):
            key = (index, -1 if pause.everywhere else rank)
            if rank == 0 or not pause.everywhere:
                share = pause.every * (1 if pause.everywhere else len(self._learners))
                if self._draw.random() * share < 1:
                    self._until[key] = number + pause.steps
            if number < self._until.get(key, 0):
                yield pause

    def _stop(self, ready: Sequence[float], data: Sequence[float], outcome: Outcome) -> None:
        """Records when the others notice that a rank has stopped in its work, and whom they name."""
        victim = self._draw.randrange(len(ready))
        moment = data[victim] + self._draw.random() * (ready[victim] - data[victim])
        noticed = min(
            min(data[rank] + learner.limit("step").seconds, ready[rank] + learner.limit(WAIT).seconds)
            for rank, learner in enumerate(self._learners)
        )
        outcome.named_s.append(max(0.0, noticed - moment) + TICK_S)
        limits = [learner.limit("step") for learner in self._learners]
        outcome.limit_s.append(max(limit.seconds for limit in limits))
        outcome.usual_s.append(max(limit.basis.p99_s for limit in limits))
        outcome.not_learned += not all(limit.learned for limit in limits)
        reports = [_report(rank, noticed, is_victim=rank == victim) for rank in range(len(ready))]
        outcome.wrong += [report.rank for report in late_ranks(reports)] != [victim]


def _report(rank: int, seconds: float, *, is_victim: bool) -> RankReport:
    """Reports a rank that hangs in its work, or one that waits for it: to the kernel both only sleep."""
    collectives, waiting = (6, False) if is_victim else (7, True)
    return RankReport(
        rank, f"node-{rank}", 1, "step", 7, seconds, 0.0, collectives, "all_gather", waiting, "sleeping", ""
    )


def simulate(work: Work, *, ranks: int, steps: int, stops: int, seed: int) -> Outcome:
    """Runs so many steps with all pauses, and asks at some of them what if a rank stopped there.

    The first stop comes after 300 steps.
    """
    outcome = Outcome()
    world = World(ranks, work, seed, list(PAUSES.values()))
    every = max(1, (steps - 300) // stops)
    for number in range(steps):
        world.step(number, outcome, stop=number >= 300 and number % every == 0)
    return outcome
