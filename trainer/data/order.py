"""Order in which an epoch visits the samples, and the seed of every random choice.

Pure numpy; knows no rank, worker or file. No array as long as the epoch is ever made: a part of the order
costs only the windows that it touches, wherever it is.

A window of w samples spans about w / (samples per shard) + 1 shards, and reads within it jump among these: a
loader process has that many files open, at most `files.OPEN_FILES`. With a window of 10,000 samples and
shards of 10,000 each that is two; with shards of 100 it is a hundred. All ranks and loader processes work in
the same few windows, so a file system sees few files at a time, each read nearly from beginning to end.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.int64]
KEPT_WINDOWS = 4


class EpochOrder:
    """Sample at each position of an epoch: shards are shuffled, then samples in windows of at most `window`.

    Samples are numbered through the shards in the order given. The result depends on the arguments alone. A
    shard of weight 1 gives each sample once per epoch, of weight 2 twice; of weight 0.5 it gives half of its
    samples, and in the next epoch the others.
    """

    def __init__(
        self,
        shard_sizes: Sequence[int],
        *,
        seed: int,
        epoch: int,
        window: int,
        weights: Sequence[float] | None = None,
    ) -> None:
        sizes = np.asarray(shard_sizes, dtype=np.int64)
        firsts = np.cumsum(sizes) - sizes
        parts = (
            _parts(sizes, firsts, weights, epoch)
            if weights is not None
            else np.stack([firsts, sizes, 0 * sizes, sizes], axis=1)
        )
        self._parts = parts[np.argsort(_draws(seed, epoch, "shards", 0, len(parts)), kind="stable")]
        self._ends = np.cumsum(self._parts[:, 3])
        self._seed, self._epoch, self._window = seed, epoch, window
        self._phase = _phase(seed, epoch, window, len(self))
        self._kept: OrderedDict[int, Samples] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def samples(self, begin: int, end: int) -> Samples:
        """Returns the sample numbers, int64 [end - begin], at the positions from `begin` up to `end`."""
        end = min(end, len(self))
        parts = [np.empty(0, dtype=np.int64)]
        for number in range(
            (begin + self._phase) // self._window, (end - 1 + self._phase) // self._window + 1
        ):
            start = max(0, number * self._window - self._phase)
            parts.append(self._in_window(number)[max(0, begin - start) : end - start])
        return np.concatenate(parts)

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
        """Returns the samples at these positions if only the shards are shuffled."""
        positions = np.arange(begin, end)
        number = np.searchsorted(self._ends, positions, side="right")
        first, size, start, length = self._parts[number].T
        samples: Samples = first + (start + positions - (self._ends[number] - length)) % size
        return samples


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


def _parts(sizes: Samples, firsts: Samples, weights: Sequence[float], epoch: int) -> Samples:
    """Returns the parts of an epoch as int64 [parts, 4].

    The columns are a shard's first sample and size, the part's start within the shard, and its length. No
    part is longer than its shard. Each epoch goes on in a shard where the previous one stopped, so that two
    halves make a whole.
    """
    rows = []
    for first, size, length in zip(
        firsts.tolist(), sizes.tolist(), _lengths(sizes, weights).tolist(), strict=True
    ):
        done = epoch * length
        rows += [
            (first, size, (done + at) % size, min(size, length - at)) for at in range(0, length, max(1, size))
        ]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


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


def _phase(seed: int, epoch: int, window: int, samples: int) -> int:
    """Returns by how much the windows' borders move in this epoch; 0 if the epoch fits one window."""
    return 0 if window >= samples else position_seed(seed, epoch, 0, "window") % window


def _draws(seed: int, epoch: int, purpose: str, begin: int, count: int) -> NDArray[np.uint64]:
    """Returns random numbers that shuffle samples when these are sorted by them.

    numpy guarantees the stream of a bit generator, but not what Generator makes of it (NEP 19).
    """
    generator = np.random.PCG64(position_seed(seed, epoch, 0, purpose))
    generator.advance(begin)
    return generator.random_raw(count)
