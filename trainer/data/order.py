"""In which order an epoch visits the samples, and the seed of every random choice. Pure numpy; knows no rank, worker or file.

Nothing as long as the epoch is ever made: any part of the order costs the windows that it touches, at its end as at its beginning.

A window of w samples spans about w / (samples of a shard) + 1 shards, and the reads within it jump among these: that many files a loader
process has open, at most `shards.OPEN_FILES`. With 10,000 samples of shards of 10,000 each that is two; shards of 100 make it a hundred.
All ranks and loader processes work in the same few windows, so a file system sees few files at a time, each read nearly from its beginning
to its end.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.int64]
KEPT_WINDOWS = 4


class EpochOrder:
    """Which sample stands at each position of an epoch: shards shuffled, then samples shuffled in windows of at most `window`.

    Samples are numbered through the shards in the order given. The result depends on the arguments alone.
    A shard of weight 1 gives each sample once an epoch, of weight 2 twice; of weight 0.5 half of them, and the next epoch the others.
    """

    def __init__(self, shard_sizes: Sequence[int], *, seed: int, epoch: int, window: int, weights: Sequence[float] | None = None) -> None:
        sizes = np.asarray(shard_sizes, dtype=np.int64)
        firsts = np.cumsum(sizes) - sizes
        parts = _parts(sizes, firsts, weights, epoch) if weights is not None else np.stack([firsts, sizes, 0 * sizes, sizes], axis=1)
        self._parts = parts[np.argsort(_draws(seed, epoch, "shards", 0, len(parts)), kind="stable")]
        self._ends = np.cumsum(self._parts[:, 3])
        self._seed, self._epoch, self._window = seed, epoch, window
        self._phase = _phase(seed, epoch, window, len(self))
        self._kept: OrderedDict[int, Samples] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def samples(self, begin: int, end: int) -> Samples:
        """Sample numbers, int64 [end - begin], at the positions from `begin` up to `end`."""
        end = min(end, len(self))
        found = [np.empty(0, dtype=np.int64)]
        for number in range((begin + self._phase) // self._window, (end - 1 + self._phase) // self._window + 1):
            start = max(0, number * self._window - self._phase)
            found.append(self._in_window(number)[max(0, begin - start) : end - start])
        return np.concatenate(found)

    def _in_window(self, number: int) -> Samples:
        if number not in self._kept:
            begin = max(0, number * self._window - self._phase)
            end = min(len(self), (number + 1) * self._window - self._phase)
            draws = _draws(self._seed, self._epoch, "samples", begin, end - begin)
            self._kept[number] = self._unshuffled(begin, end)[np.argsort(draws, kind="stable")]
            if len(self._kept) > KEPT_WINDOWS:
                self._kept.popitem(last=False)
        return self._kept[number]

    def _unshuffled(self, begin: int, end: int) -> Samples:
        """The same positions where only the shards are shuffled."""
        positions = np.arange(begin, end)
        number = np.searchsorted(self._ends, positions, side="right")
        first, size, start, length = self._parts[number].T
        found: Samples = first + (start + positions - (self._ends[number] - length)) % size
        return found


def epoch_samples(shard_sizes: Sequence[int], weights: Sequence[float] | None = None) -> int:
    """Positions of every epoch."""
    return int(sum(shard_sizes)) if weights is None else sum(_lengths(np.asarray(shard_sizes, dtype=np.int64), weights).tolist())


def position_seed(seed: int, epoch: int, position: int, purpose: str) -> int:
    """A seed in [0, 2**63) for one random choice at one position of an epoch; different purposes are independent."""
    digest = hashlib.blake2b(f"{purpose}/{seed}/{epoch}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _parts(sizes: Samples, firsts: Samples, weights: Sequence[float], epoch: int) -> Samples:
    """int64 [parts, 4]: first sample and size of a shard, where in it a part starts, the length. No part is longer than its shard.

    Each epoch goes on in a shard where the one before stopped, so that a half and another half are the whole.
    """
    rows = []
    for first, size, length in zip(firsts.tolist(), sizes.tolist(), _lengths(sizes, weights).tolist(), strict=True):
        done = epoch * length
        rows += [(first, size, (done + at) % size, min(size, length - at)) for at in range(0, length, max(1, size))]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def _lengths(sizes: Samples, weights: Sequence[float]) -> Samples:
    """Samples that each shard gives an epoch. What rounding takes from one shard the next ones get, so sources keep their weights."""
    weight = np.asarray(weights, dtype=np.float64)
    whole = np.floor(weight)  # kept out of the sum: its rounding must not take a sample from a shard of weight 1
    ends: Samples = np.floor(np.cumsum(sizes * (weight - whole)) + 0.5).astype(np.int64)
    rest = ends - np.concatenate([[0], ends[:-1]]).astype(np.int64)
    return sizes * whole.astype(np.int64) + rest


def _phase(seed: int, epoch: int, window: int, samples: int) -> int:
    """Moves the windows' borders from epoch to epoch; an epoch that fits one window stays in one."""
    return 0 if window >= samples else position_seed(seed, epoch, 0, "window") % window


def _draws(seed: int, epoch: int, purpose: str, begin: int, count: int) -> NDArray[np.uint64]:
    """Sorting by these shuffles. numpy freezes the stream of a bit generator, but not what Generator makes of it (NEP 19)."""
    generator = np.random.PCG64(position_seed(seed, epoch, 0, purpose))
    generator.advance(begin)
    return generator.random_raw(count)
