"""Measures each rank's own work while the run goes on, and names slow ranks in one log line and one event.

A rank's own work is a step without its waiting for other ranks: reading data and computing. Every few steps
the ranks exchange how long it took, with the requests that they exchange anyway (`train/loop.py`), so
nobody waits for the times.
"""

import logging
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trainer.comm.accelerator import on_accelerator
from trainer.comm.protocol import Comm
from trainer.config.recovery import Health
from trainer.text.wording import many
from trainer.world.condemned import condemn

CONDEMNED_EXCHANGES = 20
"""Exchanges in a row in which a rank was slow, from which on its node is condemned: 100 steps."""

log = logging.getLogger("clipship")


class StragglerDetector:
    """Detects slow ranks; every rank has one, and rank 0 logs.

    Its numbers travel with the consensus of each step.
    """

    def __init__(self, settings: Health, comm: Comm) -> None:
        """Collective, since it gathers the names of the nodes."""
        self._comm = comm
        enabled = settings.slow_rank_factor is not None and comm.world.size > 1
        self._slow_ranks = (
            SlowRanks(comm.world.rank, comm.world.size, settings.slow_rank_factor or 0.0) if enabled else None
        )
        self._nodes = comm.all_gather_object(comm.world.node)
        self._on_gpu = on_accelerator(comm.device)
        self._comm_s, self._own_s, self._steps = 0.0, 0.0, 0
        self.slow_ranks: Counter[int] = Counter()
        """Number of times that each rank was named since the start."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measures the block, which is one step with its data."""
        if self._steps == 0 or not self._on_gpu:
            self._collect()
        begin = time.perf_counter()
        yield
        self._own_s += time.perf_counter() - begin
        self._steps += 1
        # A GPU's time is known only once its work is done, so it is asked for seldom.
        if self._steps == EVERY or not self._on_gpu:
            self._own_s -= self._collect()
        if self._steps == EVERY:
            if self._slow_ranks is not None:
                self._slow_ranks.record(self._own_s / EVERY)
            self._steps, self._own_s = 0, 0.0

    def pop_comm_s(self) -> float:
        """Returns the seconds of communication since the last call; call it between steps."""
        self._settle()
        comm_s, self._comm_s = self._comm_s, 0.0
        return comm_s

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Marks a block between steps that belongs to no step.

        Its communication is left out; that of the steps before it still counts.
        """
        self._settle()
        yield
        self._comm.pop_seconds()

    def _settle(self) -> None:
        collected = self._collect()
        if self._on_gpu and self._steps:  # these steps count as this rank's own work when the window ends
            self._own_s -= collected

    def contribution(self) -> list[float]:
        """Returns the numbers that this rank sends before a step; mostly none."""
        return (
            self._slow_ranks.contribution() if self._slow_ranks is not None and self._slow_ranks.due else []
        )

    def receive(self, own_times: Sequence[float]) -> Iterator[dict[str, Any]]:
        """Yields an event for each slow rank, from the numbers of all ranks."""
        for slow in self._slow_ranks.receive(own_times) if own_times and self._slow_ranks else []:
            node = self._nodes[slow.rank]
            self.slow_ranks[slow.rank] += 1
            if self._comm.world.rank == 0:
                if slow.exchanges == CONDEMNED_EXCHANGES:
                    steps = slow.exchanges * EVERY
                    why = f"rank {slow.rank} there took {slow.own_s / slow.median_s:.1f} times the median"
                    condemn(node, f"{why} for {many(steps, 'step')}", os.environ)
                text = (
                    "%-12s rank %d on %s works %.3f s per step, the median of all ranks is %.3f s: "
                    "all ranks wait for it"
                )
                log.warning(text, "slow rank", slow.rank, node, slow.own_s, slow.median_s)
            yield {"slow_rank": slow.rank, "node": node, "own_s": slow.own_s, "median_s": slow.median_s}

    def _collect(self) -> float:
        seconds = self._comm.pop_seconds()
        self._comm_s += seconds
        return seconds


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
