"""In which order an epoch visits the samples, and the seed of every random choice. Pure numpy; knows no rank, worker or file."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def epoch_order(shard_sizes: Sequence[int], *, seed: int, epoch: int, window: int) -> NDArray[np.int64]:
    """Every sample number once, int64 [samples]: shards shuffled, then samples shuffled in windows of at most `window`.

    Samples are numbered through the shards in the order given. The result depends on the arguments alone.
    """
    sizes = np.asarray(shard_sizes, dtype=np.int64)
    order = _concatenated(sizes, np.argsort(_draws(seed, epoch, "shards", len(sizes)), kind="stable"))
    windows = (np.arange(len(order)) + _phase(seed, epoch, window, len(order))) // window
    return order[np.lexsort((_draws(seed, epoch, "samples", len(order)), windows))]


def position_seed(seed: int, epoch: int, position: int, purpose: str) -> int:
    """A seed in [0, 2**63) for one random choice at one position of an epoch; different purposes are independent."""
    digest = hashlib.blake2b(f"{purpose}/{seed}/{epoch}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _concatenated(sizes: NDArray[np.int64], shards: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sample numbers of the shards, one shard after the other."""
    first = (np.cumsum(sizes) - sizes)[shards]
    length = sizes[shards]
    begins_at = np.cumsum(length) - length
    return np.repeat(first - begins_at, length) + np.arange(length.sum())


def _phase(seed: int, epoch: int, window: int, samples: int) -> int:
    """Moves the windows' borders from epoch to epoch; an epoch that fits one window stays in one."""
    return 0 if window >= samples else position_seed(seed, epoch, 0, "window") % window


def _draws(seed: int, epoch: int, purpose: str, count: int) -> NDArray[np.uint64]:
    """Sorting by these shuffles. numpy freezes the stream of a bit generator, but not what Generator makes of it (NEP 19)."""
    return np.random.PCG64(position_seed(seed, epoch, 0, purpose)).random_raw(count)
