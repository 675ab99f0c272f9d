"""Requests of a rank to its loader: the samples of each micro-batch or block, in order. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from trainer.config.batch_plan import BatchPlan
from trainer.data.lanes import LaneOrder, Lanes, Pieces
from trainer.data.order import Samples
from trainer.errors import InputError


class SampleRequest(NamedTuple):
    """Samples that are loaded together; `positions` and `samples` are int64 [samples]."""

    epoch: int
    batch_in_epoch: int
    micro_batch: int
    positions: Samples
    samples: Samples
    pieces: Pieces | None = None
    """The pieces in which they lie, which only the rank needs to know."""
    places: Sequence[Any] = ()
    """Places of the samples, if they have been read ahead."""
    problem: InputError | None = None
    """Why they could not be; it is raised when these samples come."""


@dataclass(frozen=True)
class TrainRequests:
    """The requests of one rank for its micro-batches, in order."""

    shard_sizes: Sequence[int]
    weights: Sequence[float] | None
    plan: BatchPlan
    rank: int
    seed: int
    order: Lanes
    batches: int
    epochs: int | None
    start_epoch: int
    start_batch: int
    most_batches: int | None = None
    """Global batches after which they end; None: they go on to the last epoch's end."""

    @property
    def of_a_batch(self) -> int:
        """Number of requests for a global batch."""
        return self.plan.accumulation

    def __iter__(self) -> Iterator[SampleRequest]:
        most = None if self.most_batches is None else self.most_batches * self.plan.accumulation
        return islice(self._of_epochs(), most)

    def _of_epochs(self) -> Iterator[SampleRequest]:
        epoch, batch = self.start_epoch, self.start_batch
        while self.epochs is None or epoch < self.epochs:
            order = LaneOrder(
                self.shard_sizes,
                self.order,
                seed=self.seed,
                epoch=epoch,
                batch=self.plan.global_batch_size,
                weights=self.weights,
            )
            for number in range(batch, self.batches):
                yield from self._of_batch(order, epoch, number)
            epoch, batch = epoch + 1, 0

    def _of_batch(self, order: LaneOrder, epoch: int, batch: int) -> Iterator[SampleRequest]:
        first = batch * self.plan.global_batch_size + self.rank * self.plan.batch_size_per_rank
        for micro_batch in range(self.plan.accumulation):
            begin = first + micro_batch * self.plan.micro_batch_size
            end = begin + self.plan.micro_batch_size
            pieces = order.pieces(begin, end)
            yield SampleRequest(epoch, batch, micro_batch, np.arange(begin, end), pieces.samples, pieces)


class EvalRequests:
    """The requests of one rank for every `world_size`-th block of `block` consecutive samples, in order.

    The last block may be shorter, and a rank may have none.
    """

    of_a_batch = 1

    def __init__(self, shard_sizes: Sequence[int], *, rank: int, world_size: int, block: int) -> None:
        self._ends = np.cumsum(np.asarray(shard_sizes, np.int64))
        samples = int(self._ends[-1]) if len(self._ends) else 0
        self._firsts, self._block, self._samples = (
            range(rank * block, samples, world_size * block),
            block,
            samples,
        )

    def __len__(self) -> int:
        return len(self._firsts)

    def __iter__(self) -> Iterator[SampleRequest]:
        for number, first in enumerate(self._firsts):
            samples = np.arange(first, min(first + self._block, self._samples))
            yield SampleRequest(0, number, 0, samples, samples, self._pieces(number, samples))

    def _pieces(self, number: int, samples: Samples) -> Pieces:
        """Returns the parts of a block that lie in one shard each; the first sample of each is its number."""
        shards = np.searchsorted(self._ends, samples, side="right")
        ends = self._ends[shards]
        firsts = np.maximum(np.concatenate([[0], self._ends])[shards], samples[0])
        counts = np.minimum(ends, samples[-1] + 1) - firsts
        return Pieces(firsts, firsts, counts, np.full(len(samples), number), samples)
