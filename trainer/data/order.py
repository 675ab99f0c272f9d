"""Parts of an epoch by weights, draws, and the seed of each random choice: the order is made of them.

Pure numpy; knows no rank, loader process or file.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.int64]


class Parts(NamedTuple):
    """Parts of an epoch, each of one shard: int64 [parts] each. None is longer than its shard."""

    firsts: Samples
    """First sample of the shard."""
    sizes: Samples
    """Samples of the shard."""
    starts: Samples
    """Place within the shard where the part starts; behind the shard's end it goes on at its beginning."""
    lengths: Samples


def epoch_parts(shard_sizes: Sequence[int], weights: Sequence[float] | None, epoch: int) -> Parts:
    """Returns the parts of an epoch, shard by shard.

    Each epoch goes on in a shard where the previous one stopped, so that two halves make a whole.
    """
    sizes = np.asarray(shard_sizes, dtype=np.int64)
    firsts = np.cumsum(sizes) - sizes
    if weights is None:
        return Parts(firsts, sizes, 0 * sizes, sizes)
    rows = []
    for first, size, length in zip(
        firsts.tolist(), sizes.tolist(), _lengths(sizes, weights).tolist(), strict=True
    ):
        done = epoch * length
        rows += [
            (first, size, (done + at) % size, min(size, length - at)) for at in range(0, length, max(1, size))
        ]
    return Parts(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def epoch_samples(shard_sizes: Sequence[int], weights: Sequence[float] | None = None) -> int:
    """Returns the number of positions in every epoch."""
    return (
        int(sum(shard_sizes))
        if weights is None
        else sum(_lengths(np.asarray(shard_sizes, dtype=np.int64), weights).tolist())
    )


def position_seed(seed: int, epoch: int, position: int, purpose: str) -> int:
    """Returns a seed in [0, 2**63) for one random choice at one position; purposes are independent."""
    digest = hashlib.blake2b(f"{purpose}/{seed}/{epoch}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draws(seed: int, epoch: int, purpose: str, begin: int, count: int) -> NDArray[np.uint64]:
    """Returns random numbers, of the row that belongs to the epoch and the purpose those from `begin` on.

    numpy guarantees the stream of a bit generator, but not what Generator makes of it (NEP 19).
    """
    generator = np.random.PCG64(position_seed(seed, epoch, 0, purpose))
    generator.advance(begin)
    return generator.random_raw(count)


def shuffled(seed: int, epoch: int, purpose: str, begin: int, count: int) -> Samples:
    """Returns the numbers from 0 up to `count` in an order that the draws decide."""
    return np.argsort(draws(seed, epoch, purpose, begin, count), kind="stable")


def _lengths(sizes: Samples, weights: Sequence[float]) -> Samples:
    """Returns the number of samples that each shard gives per epoch.

    What rounding takes from one shard, the next ones get, so that sources keep their weights.
    """
    weight = np.asarray(weights, dtype=np.float64)
    # Whole weights are kept out of the sum: its rounding must not take a sample from a shard of weight 1.
    whole = np.floor(weight)
    ends: Samples = np.floor(np.cumsum(sizes * (weight - whole)) + 0.5).astype(np.int64)
    rest = ends - np.concatenate([[0], ends[:-1]]).astype(np.int64)
    return sizes * whole.astype(np.int64) + rest
