"""The order of new runs: exact, and sequential for every rank, however many there are.

Q is the sequence of an epoch: each shard in blocks of consecutive samples, all blocks shuffled by seed and
epoch, and the samples within their block. Q is laid out as lanes, all of one length, and read by columns: a
batch takes from each lane the next samples, as many from one lane as from another, and each lane begins at an
offset of its own, so that not all blocks end at once. With as many lanes as samples in a global batch (G), E
batches in an epoch and the offset o_j of lane j, batch k has in slot j the sample Q[j * E + (k + o_j) % E].

That gives each sample once, and knows no rank. A rank owns a run of slots, so it owns a run of lanes and
reads whole blocks one after the other: on any number of ranks that divides G, with accumulation, and after a
resume. A batch has samples of as many blocks as there are lanes, from everywhere in the data.

What is shuffled, and read, is a piece: the part of a block in one run of its lane, which ends at the lane's
end and where the lane began. Where lanes are shorter than a block, several lanes of one block are read
together, and the piece is the block.

Pure numpy; knows no rank, loader process or file. It makes no array as long as the epoch, only ones as long
as its blocks are many.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.data.order import Samples, draws, epoch_parts, shuffled
from trainer.data.recent import Recent
from trainer.text.wording import many

AT_ONCE = 2**16
"""Blocks that are placed at once, so that what is in between takes little memory."""


@dataclass(frozen=True)
class Lanes:
    """The order of lanes: the samples of a block, and the number of lanes, which divides the global batch."""

    block_samples: int
    lanes: int

    def of_epoch(
        self,
        shard_sizes: Sequence[int],
        weights: Sequence[float] | None,
        *,
        seed: int,
        epoch: int,
        batch: int,
    ) -> "LaneOrder":
        """Returns the order of an epoch in which `batch` samples are a global batch."""
        return LaneOrder(shard_sizes, self, seed=seed, epoch=epoch, batch=batch, weights=weights)

    def facts(self) -> Mapping[str, object]:
        """Returns what a checkpoint says of it."""
        return {"order": "lanes", "block_samples": self.block_samples, "lanes": self.lanes}

    def __str__(self) -> str:
        return f"{many(self.lanes, 'lane')} of blocks of {many(self.block_samples, 'sample')}"


class Pieces(NamedTuple):
    """Pieces in which the samples of some positions lie; int64 [positions] each."""

    numbers: Samples
    """Number of the piece within its epoch."""
    firsts: Samples
    """First sample of the piece; the others follow it in the same shard."""
    counts: Samples
    """Samples of the piece."""
    last_batches: Samples
    """The last batch of the epoch that has a sample of the piece."""
    samples: Samples
    """The samples themselves."""


class LaneOrder:
    """Sample at each position of an epoch.

    Position p is slot p % G of batch p // G. Samples that do not fill a batch have no position.
    """

    def __init__(
        self,
        shard_sizes: Sequence[int],
        lanes: Lanes,
        *,
        seed: int,
        epoch: int,
        batch: int,
        weights: Sequence[float] | None = None,
    ) -> None:
        self._begins, self._ends = _blocks(shard_sizes, lanes.block_samples, seed, epoch, weights)
        # Of a block that is cut where its lane begins, one part comes first and the other last: half of the
        # blocks lie backwards in Q, so that the first samples of a block are not always the late ones.
        self._backwards = draws(seed, epoch, "backwards", 0, len(self._ends)) % np.uint64(2) == 1
        self.batch, self._of_a_lane = batch, batch // lanes.lanes
        self._batches = (int(self._ends[-1]) if len(self._ends) else 0) // batch
        self._length = self._batches * self._of_a_lane
        # Equal on every machine, and a little uneven only where an epoch has some 2**60 batches.
        offsets = draws(seed, epoch, "lanes", 0, lanes.lanes) % np.uint64(max(1, self._batches))
        self._offsets = offsets.astype(np.int64)
        self._cuts = self._length > lanes.block_samples
        self._seed, self._epoch = seed, epoch
        self._kept: Recent[int, NDArray[np.int32]] = Recent(2 * lanes.lanes)

    def __len__(self) -> int:
        return self._batches * self.batch

    @property
    def nbytes(self) -> int:
        """Memory in bytes of what it keeps."""
        kept = sum(order.nbytes for order in self._kept.values())
        return sum(part.nbytes for part in (self._begins, self._ends, self._backwards, self._offsets)) + kept

    def samples(self, begin: int, end: int) -> Samples:
        """Returns the sample numbers, int64 [end - begin], at the positions from `begin` up to `end`."""
        return self.pieces(begin, end).samples

    def pieces(self, begin: int, end: int) -> Pieces:
        """Returns the samples at the positions from `begin` up to `end`, and the pieces that hold them."""
        batch, slot = np.divmod(np.arange(begin, min(end, len(self))), self.batch)
        lane, neighbour = np.divmod(slot, self._of_a_lane)
        offset = self._offsets[lane]
        within = (batch + offset) % max(1, self._batches) * self._of_a_lane + neighbour
        place = lane * self._length + within
        block = np.searchsorted(self._ends, place, side="right")
        block_begin = np.where(block > 0, self._ends[block - 1], 0)
        start, stop, last = block_begin, self._ends[block], np.full(len(place), self._batches - 1)
        if self._cuts:
            seam = offset * self._of_a_lane
            behind = within >= seam
            lane_begin = lane * self._length
            start = np.maximum(start, lane_begin + np.where(behind, seam, 0))
            stop = np.minimum(stop, lane_begin + np.where(behind, self._length, seam))
            last = ((stop - 1 - lane_begin) // self._of_a_lane - offset) % self._batches
        before = np.where(self._backwards[block], self._ends[block] - stop, start - block_begin)
        firsts, counts = self._begins[block] + before, stop - start
        moved = [
            self._shuffled(number, count)[at]
            for number, count, at in zip(
                start.tolist(), counts.tolist(), (place - start).tolist(), strict=True
            )
        ]
        return Pieces(start, firsts, counts, last, firsts + np.array(moved, dtype=np.int64))

    def _shuffled(self, number: int, count: int) -> NDArray[np.int32]:
        """Returns the order of the samples within a piece, which a batch after the other asks for."""
        return self._kept.get(
            number, lambda: shuffled(self._seed, self._epoch, "within", number, count).astype(np.int32)
        )


def _blocks(
    shard_sizes: Sequence[int], block: int, seed: int, epoch: int, weights: Sequence[float] | None
) -> tuple[Samples, Samples]:
    """Returns the first sample of each block, in the order of Q, and the place in Q behind each block.

    The blocks of a shard are as equal as can be, and none has more than `block` samples.
    """
    first, size, start, length = epoch_parts(shard_sizes, weights, epoch)
    ahead = np.minimum(length, size - start)  # a part that goes on at its shard's beginning is two
    firsts = np.stack([first + start, first], axis=1).reshape(-1)
    lengths = np.stack([ahead, length - ahead], axis=1).reshape(-1)
    counts = -(-lengths // block)
    ends = np.cumsum(counts)
    order = shuffled(seed, epoch, "blocks", 0, int(ends[-1]) if len(ends) else 0)
    begins, lengths_of = np.empty_like(order), np.empty_like(order)
    for at in range(0, len(order), AT_ONCE):
        part = slice(at, at + AT_ONCE)
        run = np.searchsorted(ends, order[part], side="right")
        number, of_run, samples = order[part] - (ends[run] - counts[run]), counts[run], lengths[run]
        begins[part] = number * samples // of_run
        lengths_of[part] = (number + 1) * samples // of_run - begins[part]
        begins[part] += firsts[run]
    return begins, np.cumsum(lengths_of, out=lengths_of)
