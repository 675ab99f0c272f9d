"""What a source of samples is, and how samples are numbered: shared by shards, tables and synthetic data. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.errors import InputError


class BadSample(InputError):
    """One sample that cannot be used, or the end of a shard: then `key` is empty. What stands beside it can."""

    def __init__(self, origin: str, key: str, cause: str, what: str) -> None:
        super().__init__(f"{origin}: sample {key}: {what}" if key else f"{origin}: {what}")
        self.origin, self.key, self.what = origin, key, what
        self.cause = cause
        """A few words that many bad samples share: they are counted by it."""

    def __reduce__(self) -> tuple[type["BadSample"], tuple[str, str, str, str]]:
        return BadSample, (self.origin, self.key, self.cause, self.what)


@dataclass(frozen=True)
class RawSample:
    """One sample as it is stored: `captions` is empty for labelled sources, `label` is None for captioned ones."""

    key: str
    origin: str
    """The shard, or the table and its row, for messages."""
    image: bytes | NDArray[np.uint8]
    """An encoded file, or pixels [height, width, 3]."""
    captions: tuple[str, ...]
    label: int | None = None


@dataclass(frozen=True)
class LeftOut:
    """What stands in the files and is no usable sample: known before any sample is read."""

    by_cause: Mapping[str, int] = field(default_factory=dict)
    """How many samples."""
    named: Sequence[BadSample] = ()
    """Some of them, shard by shard."""

    @property
    def count(self) -> int:
        """Samples left out."""
        return sum(self.by_cause.values())


class Source(Protocol):
    """Samples by number. Picklable into loader processes; each process opens files when it first needs them."""

    @property
    def left_out(self) -> LeftOut:
        """Samples in the files that cannot be used."""

    def __len__(self) -> int:
        """Usable samples."""

    def shard_sizes(self) -> list[int]:
        """Samples of each shard, in the order in which samples are numbered; a table is one shard."""

    def read(self, index: int) -> RawSample:
        """Raises BadSample where only this sample cannot be used, InputError that names the file where it cannot be read."""


class Numbering:
    """Samples numbered from 0 through shards of the given sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
        self.samples = int(self._ends[-1]) if len(self._ends) else 0

    def locate(self, index: int) -> tuple[int, int]:
        """The shard, and the row within it; IndexError where there is no such sample."""
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - (int(self._ends[shard - 1]) if shard else 0)
