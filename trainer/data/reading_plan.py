"""Says what a rank reads at once of shards, and the memory that this takes, as known before a start.

`lanes.py` chooses by the same limits. Imports neither torch nor numpy.
"""

import os
from collections.abc import Iterator

from trainer.config import Data, Job, is_remote
from trainer.config.batch_plan import BatchPlan
from trainer.config.formats import FORMATS
from trainer.data.shard_names import expand_shards

BLOCK_BYTES = 2**22
"""Size of a block of shards, if memory allows it: storage with 30 ms to the first byte then gives most of its
rate, and a hundred samples of the usual size cost one request."""
MOST_BYTES = 2**30
"""Largest memory of a rank for its open blocks."""
CONNECTIONS = 16
"""Pieces of blocks that a rank reads at the same time."""
MOST_SHARE = 8
"""Part of a rank's share of the memory that its open blocks may take: one in so many."""


def reading_rows(job: Job, batch_plan: BatchPlan) -> Iterator[tuple[str, str]]:
    """Yields topic and text of the line of `clipship check` about what a rank reads of shards."""
    data = job.data
    if data.streams or "read_ahead_mb" not in FORMATS[data.kind].reads:
        return
    ahead = data.read_ahead_mb * 2**20
    if "block_samples" not in FORMATS[data.kind].reads:
        most = _mb(data.row_group_cache_mb * 2**20)
        text = f"row groups, each once: a rank has at most {most} of them open, and reads {_mb(ahead)} ahead"
    else:
        text = _of_blocks(data, batch_plan, ahead)
    yield "reading", text


def _of_blocks(data: Data, batch_plan: BatchPlan, ahead: int) -> str:
    blocks, opened = "blocks of 4 MiB", min(MOST_BYTES, batch_plan.batch_size_per_rank * BLOCK_BYTES)
    if data.block_samples is not None:
        blocks, opened = f"blocks of {data.block_samples:,} samples", MOST_BYTES
    size = _local_bytes(expand_shards(data.train))
    # A lane begins somewhere in a block: half of it is read at first.
    first, most, coming = (_mb(min(part, size or part)) for part in (opened // 2, opened, ahead))
    return (
        f"{blocks}, each once: in a new run a rank reads up to {first} before its first step, has at most "
        f"{most} of them open, and reads {coming} ahead"
    )


def _local_bytes(files: list[str]) -> int | None:
    """Returns the size of the files; None if some are not here."""
    try:
        return None if any(map(is_remote, files)) else sum(os.path.getsize(file) for file in files)
    except OSError:
        return None


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
