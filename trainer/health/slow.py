"""Which rank holds up the others: every few steps the ranks tell each other how long their own work took, without waiting for it. No torch.

A rank's own work is a step without its waiting for other ranks: reading data and computing. What it tells travels with the questions that
ranks ask each other anyway (`agreement.py`).
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

EVERY = 5
"""Steps between two tellings."""
_TIMES = 2
"""So many tellings in a row make a rank slow: one may be a page that came late."""
_NOTICEABLE_S = 0.01


@dataclass(frozen=True)
class Slow:
    """A rank, its own seconds of a step, and the ranks' median."""

    rank: int
    own_s: float
    median_s: float


class Paces:
    """On each rank. `share` is what it tells, `hear` takes the sum of what all told."""

    def __init__(self, rank: int, world_size: int, factor: float) -> None:
        self._rank, self._size, self._factor = rank, world_size, factor
        self._own_s: float | None = None
        self._slow_times = [0] * world_size

    def spent(self, own_s: float) -> None:
        """A step's own work took so long, on average over the last EVERY."""
        self._own_s = own_s

    @property
    def due(self) -> bool:
        """The same on all ranks, which count the same steps."""
        return self._own_s is not None

    def share(self) -> list[float]:
        """This rank's mean at its place, zeros elsewhere: the sum over the ranks has them all. Begins anew."""
        told = [0.0] * self._size
        told[self._rank], self._own_s = self._own_s or 0.0, None
        return told

    def hear(self, told: Sequence[float]) -> list[Slow]:
        """The ranks that have just become slow, or still are after as many tellings again."""
        median = statistics.median_low(told)  # of two ranks the faster one
        for rank, own in enumerate(told):
            slow = own > self._factor * median and own - median > _NOTICEABLE_S
            self._slow_times[rank] = self._slow_times[rank] + 1 if slow else 0
        return [Slow(rank, told[rank], median) for rank, times in enumerate(self._slow_times) if times and times % _TIMES == 0]
