"""Says what a rank reads at once of shards, and the memory that this takes, as known before a start.

`choose_order.py` chooses by the same limits. Imports neither torch nor numpy.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from trainer.config import Data, Job, is_remote
from trainer.config.batch_plan import BatchPlan
from trainer.config.formats import FORMATS
from trainer.data.shard_names import expand_shards
from trainer.text.wording import many

BLOCK_BYTES = 2**22
"""Size of a block of shards, if memory allows it: storage with 30 ms to the first byte then gives most of its
rate, and a hundred samples of the usual size cost one request."""
MOST_BYTES = 2**30
"""Largest memory of a rank for its open blocks."""
CONNECTIONS = 16
"""Pieces of blocks that a rank reads at the same time."""
MOST_SHARE = 8
"""Part of a rank's share of the memory that its open blocks may take: one in so many."""


def reading_rows(
    job: Job, batch_plan: BatchPlan, begun: Mapping[str, Any] | None = None, samples: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yields topic and text of the line of `clipship check` about what a rank reads of shards.

    `begun` is the order that is recorded of the run, None for a new one, and `samples` are those of an epoch,
    if they are known.
    """
    data = job.data
    if data.streams or "read_ahead_mb" not in FORMATS[data.kind].reads:
        return
    if (begun or {"order": data.order})["order"] == "window":
        yield "reading", f"at random, sample by sample, in a window of {data.shuffle_window:,} samples"
        return
    if not _reads_blocks(data):
        opened, ahead = (_mb(size * 2**20) for size in (data.row_group_cache_mb, data.read_ahead_mb))
        yield "reading", f"row groups, each once: at most {opened} of them open in a rank, and {ahead} ahead"
        return
    size = _local_bytes(expand_shards(data.train))
    ahead_bytes = data.read_ahead_mb * 2**20
    what, most = (
        _of_a_new_run(data, batch_plan)
        if begun is None
        else _of_a_begun_run(begun, data, batch_plan, size and samples and size / samples)
    )
    if size is not None:
        most, ahead_bytes = min(most or size, size), min(ahead_bytes, size)
    blocks = f"at most {_mb(most)} of them open in a rank, and " if most else ""
    yield "reading", f"{what}, each once: {blocks}{_mb(ahead_bytes)} ahead"


class FirstBatch(NamedTuple):
    """Reads of a rank for its part of the first batch."""

    requests: int
    size: int | None
    """Bytes; None if they are not known."""


def first_batch(
    job: Job, batch_plan: BatchPlan, begun: Mapping[str, Any] | None = None, samples: int | None = None
) -> FirstBatch:
    """Returns it for shards; the arguments are those of `reading_rows`."""
    data, slots = job.data, batch_plan.batch_size_per_rank
    if (begun or {"order": data.order})["order"] == "window":
        return FirstBatch(slots, None)
    size = _local_bytes(expand_shards(data.train))
    if begun is None:
        _, most = _of_a_new_run(data, batch_plan)
    else:
        slots = lanes_of_a_rank(batch_plan.global_batch_size, batch_plan.world_size, begun["lanes"])
        _, most = _of_a_begun_run(begun, data, batch_plan, size and samples and size / samples)
    # A lane begins somewhere in a block: half of it is read at first.
    return FirstBatch(slots, most and min(most // 2, size or most))


def lanes_of_a_rank(batch: int, ranks: int, lanes: int) -> int:
    """Returns the most lanes of which one rank has slots; ranks may share one."""
    slots, of_a_lane = batch // ranks, batch // lanes
    begins = range(0, batch, slots)
    return max((begin + slots - 1) // of_a_lane - begin // of_a_lane + 1 for begin in begins)


def fitting_lanes(batch: int, ranks: int, block_bytes: float, room: int) -> int:
    """Returns the most lanes, a divisor of the batch, of which a rank's blocks take at most `room` bytes."""
    divisors = (number for number in range(batch, 0, -1) if batch % number == 0)
    return next(
        (number for number in divisors if lanes_of_a_rank(batch, ranks, number) * block_bytes <= room), 1
    )


def _reads_blocks(data: Data) -> bool:
    return "block_samples" in FORMATS[data.kind].reads and not data.streams


def _of_a_new_run(data: Data, batch_plan: BatchPlan) -> tuple[str, int | None]:
    """Returns what the blocks are, and the most bytes of them that a rank has open."""
    if data.block_samples is not None:
        return f"blocks of {data.block_samples:,} samples", MOST_BYTES
    return "blocks of 4 MiB", min(MOST_BYTES, batch_plan.batch_size_per_rank * BLOCK_BYTES)


def _of_a_begun_run(
    begun: Mapping[str, Any], data: Data, batch_plan: BatchPlan, sample_bytes: float | None
) -> tuple[str, int | None]:
    """Returns the same of a run whose blocks and lanes stay: the fewer ranks, the more of them are a rank's.

    The bytes are None if they are not known.
    """
    lanes = lanes_of_a_rank(batch_plan.global_batch_size, batch_plan.world_size, begun["lanes"])
    block_bytes = begun["block_samples"] * sample_bytes if sample_bytes else None
    if data.block_samples is None:
        block_bytes = min(block_bytes or BLOCK_BYTES, BLOCK_BYTES)
    what = (
        f"{many(lanes, 'block')} of {many(begun['block_samples'], 'sample')} at a time, as the run was begun"
    )
    return what, None if block_bytes is None else round(lanes * block_bytes)


def _local_bytes(files: list[str]) -> int | None:
    """Returns the size of the files; None if some are not here."""
    try:
        return None if any(map(is_remote, files)) else sum(os.path.getsize(file) for file in files)
    except OSError:
        return None


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
