"""Chooses the order of a run's samples at its first start, and finds it again at the later ones. No torch.

What is chosen is recorded with the run, so that it stays on any number of ranks and on other machines.
"""

from collections.abc import Mapping
from typing import Any

from trainer.comm.protocol import Comm
from trainer.config import Data, Job
from trainer.data.blocks import InBlocks
from trainer.data.indexed import Indexed
from trainer.data.lanes import Lanes
from trainer.data.order import Order
from trainer.data.reading_plan import BLOCK_BYTES, MOST_BYTES, MOST_SHARE, fitting_lanes
from trainer.data.sample import InUnits, Source
from trainer.data.window_order import Window
from trainer.sysinfo.memory import host_bytes

ALONE = 256
"""Samples of a block where each sample is read on its own, whatever its neighbours are."""
LEAST = 16
"""Samples that a block has at least; where memory has no room for so many, there are fewer lanes."""


def order_of_run(job: Job, comm: Comm, source: Source, recorded: Mapping[str, Any] | None) -> Order:
    """Collective: returns the order that is recorded of the run, or chooses one for a new run."""
    if recorded is None:
        room = min(MOST_BYTES, host_bytes() // MOST_SHARE // max(1, comm.world.local_size))
        chosen = choose_order(job.data, source, job.optim.global_batch_size, comm.world.size, room)
        recorded = comm.broadcast_object(dict(chosen.facts()))
    return order_by(recorded, job.data)


def order_by(recorded: Mapping[str, Any], data: Data) -> Order:
    """Returns the order that a run has by what was recorded of it."""
    if recorded["order"] == "window":
        return Window(data.shuffle_window)
    return Lanes(recorded["block_samples"], recorded["lanes"])


def choose_order(data: Data, source: Source, batch: int, ranks: int, room: int) -> Order:
    """Returns the order for a new run with global batches of `batch` samples.

    The blocks that a rank has open take at most `room` bytes, or less row groups than a loader process keeps.
    """
    if data.order == "window":
        return Window(data.shuffle_window)
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
