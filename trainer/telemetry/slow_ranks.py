"""Finds the ranks that hold up the others: every few steps the ranks exchange how long their own work took.

No torch. A rank's own work is a step without its waiting for other ranks: reading data and computing. The
times travel with the requests that ranks exchange anyway (`comm/consensus.py`), so nobody waits for them.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

EVERY = 5
"""Number of steps between two exchanges."""
_TIMES = 2
"""Number of exchanges in a row that make a rank slow; a single one may be a late memory page."""
_NOTICEABLE_S = 0.01


@dataclass(frozen=True)
class SlowRank:
    """A slow rank, the seconds per step of its own work, and the ranks' median."""

    rank: int
    own_s: float
    median_s: float
    exchanges: int
    """Number of exchanges in a row in which it was slow."""


class SlowRanks:
    """Finds slow ranks from the times of all ranks' own work.

    `contribution` returns what this rank sends; `receive` takes the sum over all ranks.
    """

    def __init__(self, rank: int, world_size: int, factor: float) -> None:
        self._rank, self._size, self._factor = rank, world_size, factor
        self._own_s: float | None = None
        self._slow_times = [0] * world_size

    def record(self, own_s: float) -> None:
        """Records a step's own work, in seconds, averaged over the last EVERY steps."""
        self._own_s = own_s

    @property
    def due(self) -> bool:
        """True if an exchange is due. All ranks count the same steps, so they agree."""
        return self._own_s is not None

    def contribution(self) -> list[float]:
        """Returns this rank's mean at its index and zeros elsewhere; the sum over the ranks holds all.

        Starts a new mean.
        """
        own_times = [0.0] * self._size
        own_times[self._rank], self._own_s = self._own_s or 0.0, None
        return own_times

    def receive(self, own_times: Sequence[float]) -> list[SlowRank]:
        """Returns the ranks that have just become slow, or still are after as many exchanges again."""
        median = statistics.median_low(own_times)  # the faster one of two ranks
        for rank, own in enumerate(own_times):
            slow = own > self._factor * median and own - median > _NOTICEABLE_S
            self._slow_times[rank] = self._slow_times[rank] + 1 if slow else 0
        return [
            SlowRank(rank, own_times[rank], median, times)
            for rank, times in enumerate(self._slow_times)
            if times and times % _TIMES == 0
        ]
