"""Requests of a rank to its loader: the samples of each micro-batch, in the run's order. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from trainer.config.batch_plan import BatchPlan
from trainer.data.lanes import LaneOrder, Pieces
from trainer.data.order import EpochOrder, Order, Samples
from trainer.errors import InputError


class TrainRequest(NamedTuple):
    """Samples of one micro-batch; `positions` and `samples` are int64 [samples]."""

    epoch: int
    batch_in_epoch: int
    micro_batch: int
    positions: Samples
    samples: Samples
    pieces: Pieces | None = None
    """The pieces in which they lie, which only the rank needs to know; None in the window's order."""
    places: Sequence[Any] = ()
    """Places of the samples, if they have been read ahead."""
    problem: InputError | None = None
    """Why they could not be; it ends the run when this micro-batch comes."""


@dataclass(frozen=True)
class TrainRequests:
    """The requests of one rank, in order."""

    shard_sizes: Sequence[int]
    weights: Sequence[float] | None
    plan: BatchPlan
    rank: int
    seed: int
    order: Order
    batches: int
    epochs: int | None
    start_epoch: int
    start_batch: int
    most_batches: int | None = None
    """Global batches after which they end; None: they go on to the last epoch's end."""

    def __iter__(self) -> Iterator[TrainRequest]:
        most = None if self.most_batches is None else self.most_batches * self.plan.accumulation
        return islice(self._of_epochs(), most)

    def _of_epochs(self) -> Iterator[TrainRequest]:
        epoch, batch = self.start_epoch, self.start_batch
        while self.epochs is None or epoch < self.epochs:
            order = self.order.of_epoch(
                self.shard_sizes,
                self.weights,
                seed=self.seed,
                epoch=epoch,
                batch=self.plan.global_batch_size,
            )
            for number in range(batch, self.batches):
                yield from self._of_batch(order, epoch, number)
            epoch, batch = epoch + 1, 0

    def _of_batch(self, order: EpochOrder, epoch: int, batch: int) -> Iterator[TrainRequest]:
        first = batch * self.plan.global_batch_size + self.rank * self.plan.batch_size_per_rank
        for micro_batch in range(self.plan.accumulation):
            begin = first + micro_batch * self.plan.micro_batch_size
            end = begin + self.plan.micro_batch_size
            pieces = order.pieces(begin, end) if isinstance(order, LaneOrder) else None
            samples = order.samples(begin, end) if pieces is None else pieces.samples
            yield TrainRequest(epoch, batch, micro_batch, np.arange(begin, end), samples, pieces)
