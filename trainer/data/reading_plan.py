"""Says what a rank reads at once of shards, and the memory that this takes, as known before a start.

`choose_order.py` chooses by the same limits. Imports neither torch nor numpy.
"""

import os
from collections.abc import Iterator

from trainer.config import Job, is_remote
from trainer.config.batch_plan import BatchPlan
from trainer.config.formats import FORMATS
from trainer.data.shard_names import expand_shards

BLOCK_BYTES = 2**22
"""Size of a block of shards, if memory allows it: storage with 30 ms to the first byte then gives most of its
rate, and a hundred samples of the usual size cost one request."""
MOST_BYTES = 2**30
"""Largest memory of a rank for its open blocks."""
MOST_SHARE = 8
"""Part of a rank's share of the memory that its open blocks may take: one in so many."""


def reading_rows(job: Job, batch_plan: BatchPlan) -> Iterator[tuple[str, str]]:
    """Yields topic and text of the line of `clipship check` about what a rank reads of shards."""
    data = job.data
    if "block_samples" not in FORMATS[data.kind].reads or data.streams:
        return
    if data.order == "window":
        yield "reading", f"at random, sample by sample, in a window of {data.shuffle_window:,} samples"
        return
    most = MOST_BYTES
    if data.block_samples is None:
        most = min(most, batch_plan.batch_size_per_rank * BLOCK_BYTES)
    ahead = data.read_ahead_mb * 2**20
    size = _local_bytes(expand_shards(data.train))
    if size is not None:
        most = min(most, size)
        ahead = min(ahead, size)
    what = "blocks of 4 MiB" if data.block_samples is None else f"blocks of {data.block_samples:,} samples"
    yield "reading", f"{what}, each once: at most {_mb(most)} of them open in a rank, and {_mb(ahead)} ahead"


def _local_bytes(files: list[str]) -> int | None:
    """Returns the size of the files; None if some are not here."""
    try:
        return None if any(map(is_remote, files)) else sum(os.path.getsize(file) for file in files)
    except OSError:
        return None


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
