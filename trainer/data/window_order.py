"""The order in which runs were begun before there were lanes: shards are shuffled, then samples in a window.

Neighbours of a window are dealt over all ranks, so each of them reads at random. No array as long as the
epoch is ever made: a part of the order costs only the windows that it touches, wherever it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from trainer.data.order import Samples, epoch_parts, position_seed, shuffled
from trainer.data.recent import Recent

KEPT_WINDOWS = 4


@dataclass(frozen=True)
class Window:
    """The window's order, with `data.shuffle_window` samples."""

    samples: int

    def of_epoch(
        self,
        shard_sizes: Sequence[int],
        weights: Sequence[float] | None,
        *,
        seed: int,
        epoch: int,
        batch: int,
    ) -> "WindowOrder":
        """Returns the order of an epoch; it does not depend on the batch."""
        return WindowOrder(shard_sizes, seed=seed, epoch=epoch, window=self.samples, weights=weights)

    def facts(self) -> Mapping[str, object]:
        """Returns what a checkpoint says of it; the window is a key of the job, which it has as well."""
        return {"order": "window"}

    def __str__(self) -> str:
        return f"window of {self.samples:,} samples"


class WindowOrder:
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
        parts = np.stack(epoch_parts(shard_sizes, weights, epoch), axis=1)
        self._parts = parts[shuffled(seed, epoch, "shards", 0, len(parts))]
        self._ends = np.cumsum(self._parts[:, 3])
        self._seed, self._epoch, self._window = seed, epoch, window
        self._phase = _phase(seed, epoch, window, len(self))
        self._kept: Recent[int, Samples] = Recent(KEPT_WINDOWS)

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
            window = self._kept.get(number, partial(self._in_window, number))
            parts.append(window[max(0, begin - start) : end - start])
        return np.concatenate(parts)

    def _in_window(self, number: int) -> Samples:
        begin = max(0, number * self._window - self._phase)
        end = min(len(self), (number + 1) * self._window - self._phase)
        order = shuffled(self._seed, self._epoch, "samples", begin, end - begin)
        return self._unshuffled(begin, end)[order]

    def _unshuffled(self, begin: int, end: int) -> Samples:
        """Returns the samples at these positions if only the shards are shuffled."""
        positions = np.arange(begin, end)
        number = np.searchsorted(self._ends, positions, side="right")
        first, size, start, length = self._parts[number].T
        samples: Samples = first + (start + positions - (self._ends[number] - length)) % size
        return samples


def _phase(seed: int, epoch: int, window: int, samples: int) -> int:
    """Returns by how much the windows' borders move in this epoch; 0 if the epoch fits one window."""
    return 0 if window >= samples else position_seed(seed, epoch, 0, "window") % window
