"""The order of a run's samples: exact, and sequential for every rank, however many there are.

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

An order knows no rank, loader process or file. It makes no array as long as the epoch, only ones as long as
its blocks are many. The lanes are chosen at a run's first start, by the memory of its ranks. They are
recorded with the run, so that they stay on any number of ranks and on other machines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.config import Data, Job
from trainer.data.blocks import InBlocks
from trainer.data.indexed import Indexed
from trainer.data.order import Samples, draws, epoch_parts, shuffled
from trainer.data.reading_plan import BLOCK_BYTES, MOST_BYTES, MOST_SHARE
from trainer.data.recent import Recent
from trainer.data.sample import InUnits, Source
from trainer.sysinfo.memory import host_bytes
from trainer.text.wording import many

if TYPE_CHECKING:
    from trainer.comm.protocol import Comm

AT_ONCE = 2**16
"""Blocks that are placed at once, so that what is in between takes little memory."""
ALONE = 256
"""Samples of a block where each sample is read on its own, whatever its neighbours are."""
LEAST = 16
"""Samples that a block has at least; where memory has no room for so many, there are fewer lanes."""


@dataclass(frozen=True)
class Lanes:
    """The order of lanes: the samples of a block, and the number of lanes, which divides the global batch."""

    block_samples: int
    lanes: int

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


def lanes_of_run(job: Job, comm: "Comm", source: Source, recorded: Mapping[str, int] | None) -> Lanes:
    """Collective: returns the lanes that are recorded of the run, or chooses them for a new run."""
    if recorded is None:
        room = min(MOST_BYTES, host_bytes() // MOST_SHARE // max(1, comm.world.local_size))
        chosen = choose_lanes(job.data, source, job.optim.global_batch_size, comm.world.size, room)
        recorded = comm.broadcast_object(asdict(chosen))
    return Lanes(recorded["block_samples"], recorded["lanes"])


def choose_lanes(data: Data, source: Source, batch: int, ranks: int, room: int) -> Lanes:
    """Returns the lanes for a new run with global batches of `batch` samples.

    The blocks that a rank has open take at most `room` bytes, or less row groups than a loader process keeps.
    """
    sample_bytes = mean_sample_bytes(source)
    if isinstance(source, InUnits):
        group = max(1, *source.shard_sizes())
        room = data.row_group_cache_mb * 2**20
        return Lanes(group, fitting_lanes(batch, ranks, group * sample_bytes, room))
    if not isinstance(source, InBlocks) or not sample_bytes:
        return Lanes(data.block_samples or ALONE, batch)
    wanted = data.block_samples or max(1, round(BLOCK_BYTES / sample_bytes))
    fitting = int(room / sample_bytes / -(-batch // ranks))
    block = wanted if data.block_samples else min(wanted, max(LEAST, fitting))
    return Lanes(block, fitting_lanes(batch, ranks, block * sample_bytes, room))


def mean_sample_bytes(source: Source) -> float:
    """Returns what a sample takes in its file on average; 0 if no index on disk says it."""
    if not isinstance(source, Indexed):
        return 0
    size = sum(entry.size for entry in source.index.entries)
    return size / max(1, len(source))


def fitting_lanes(batch: int, ranks: int, block_bytes: float, room: int) -> int:
    """Returns the most lanes, a divisor of the batch, of which a rank's blocks take at most `room` bytes."""
    divisors = (number for number in range(batch, 0, -1) if batch % number == 0)
    return next(
        (number for number in divisors if lanes_of_a_rank(batch, ranks, number) * block_bytes <= room), 1
    )


def lanes_of_a_rank(batch: int, ranks: int, lanes: int) -> int:
    """Returns the most lanes of which one rank has slots; ranks may share one."""
    slots, of_a_lane = batch // ranks, batch // lanes
    begins = range(0, batch, slots)
    return max((begin + slots - 1) // of_a_lane - begin // of_a_lane + 1 for begin in begins)
