"""Protocol of a source of samples, and the numbering of samples; for shards, tables and synthetic data.

No torch.
"""

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from trainer.errors import InputError
from trainer.text.terminal import one_line
from trainer.text.wording import many

if TYPE_CHECKING:
    from trainer.data.captions import Captions

MOST_BYTES = 256_000_000
"""Largest number of bytes of a member or an image file.

A larger one counts as an attack on memory, or as a mistake.
"""


_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class BadSample(InputError):
    """Raised for one sample that cannot be used, or for the lost end of a shard: then `key` is empty.

    Other samples of the shard can still be used.
    """

    def __init__(self, origin: str, key: str, cause: str, what: str) -> None:
        text = f"{origin}: sample {key}: {what}" if key else f"{origin}: {what}"
        super().__init__(one_line(text))  # the key comes from whoever packed the shard
        self.origin, self.key, self.what = origin, key, what
        self.cause = cause
        """Cause in a few words, the same for many bad samples, which are counted by it."""

    def __reduce__(self) -> tuple[type["BadSample"], tuple[str, str, str, str]]:
        return BadSample, (self.origin, self.key, self.cause, self.what)


def check_file(origin: str, key: str, status: os.stat_result, most_bytes: int) -> None:
    """Raises BadSample if the sample's image is no regular file or has more bytes than allowed.

    Reading anything but a regular file might never end.
    """
    if not stat.S_ISREG(status.st_mode):
        raise BadSample(origin, key, "not a file", f"its image is {kind_of_file(status)}, not a file")
    check_bytes(origin, key, "image file", status.st_size, most_bytes)


def kind_of_file(status: os.stat_result) -> str:
    """Returns the kind of file at a path, for a message."""
    return _KINDS.get(stat.S_IFMT(status.st_mode), "no regular file")


def check_bytes(origin: str, key: str, what: str, size: int, most_bytes: int) -> None:
    """Raises BadSample if `what`, a part of the sample, has more bytes than allowed.

    Nothing of it has been read yet.
    """
    if size > most_bytes:
        message = f"its {what} has {many(size, 'byte')}; data.max_member_bytes allows {most_bytes:,}"
        raise BadSample(origin, key, "too large", message)


@dataclass(frozen=True)
class RawSample:
    """One sample as it is stored.

    `captions` is empty for labelled sources, `label` is None for captioned ones.
    """

    key: str
    origin: str
    """The shard, or the table and its row, for messages."""
    image: bytes | NDArray[np.uint8]
    """An encoded file, or pixels [height, width, 3]."""
    captions: tuple[str, ...]
    label: int | None = None
    caption_counts: tuple[int, ...] = ()
    """Number of captions of each key that they come from, in their order; empty if there is one key."""
    target: NDArray[np.floating[Any]] | None = None
    """Features [images + captions, D] that teachers have stored of it, if the source has them: those of
    pictures first, those of several teachers side by side."""
    group: int = 0
    """Number of its id in data.group_by, int64; 0: it has none, or none is asked for."""


@dataclass(frozen=True)
class LeftOut:
    """Samples in the files that are not used, as known before any sample is read."""

    by_cause: Mapping[str, int] = field(default_factory=dict)
    """Number of samples that cannot be used, by cause."""
    named: Sequence[BadSample] = ()
    """Some of these samples, shard by shard."""

    filtered: Mapping[str, int] = field(default_factory=dict)
    """Number of samples that data.filters leave out, by filter; they are not bad."""

    @property
    def count(self) -> int:
        """Number of samples that cannot be used."""
        return sum(self.by_cause.values())

    @property
    def every(self) -> dict[str, int]:
        """All samples that are left out, by cause or filter."""
        return {**self.by_cause, **{f"filter {text}": count for text, count in self.filtered.items()}}


def all_filtered(where: str, filtered: Mapping[str, int]) -> str:
    """Returns a message: no sample is left, and how many each filter has left out."""
    counts = ", ".join(f"{text} left out {count:,}" for text, count in filtered.items())
    return f"{where}: data.filters keep no sample ({counts}): change the filters"


class Source(Protocol):
    """Protocol of a source: samples by number.

    It is picklable into loader processes; each process opens files when it first needs them.
    """

    @property
    def left_out(self) -> LeftOut:
        """Samples in the files that cannot be used."""

    def __len__(self) -> int:
        """Returns the number of usable samples."""

    def shard_sizes(self) -> list[int]:
        """Returns the samples of each shard, in the order in which samples are numbered.

        A table is one shard.
        """

    def read(self, index: int) -> RawSample:
        """Returns one sample.

        Raises BadSample if only this sample cannot be used, and InputError, which names the file, if that
        cannot be read.
        """


@dataclass(frozen=True)
class Subset:
    """Source of some samples of another one, by their numbers."""

    source: Source
    numbers: Sequence[int]

    @property
    def left_out(self) -> LeftOut:
        return self.source.left_out

    def __len__(self) -> int:
        return len(self.numbers)

    def shard_sizes(self) -> list[int]:
        return [len(self.numbers)]

    def read(self, index: int) -> RawSample:
        return self.source.read(self.numbers[index])


class Captioned(Source, Protocol):
    """Protocol of a source whose captions are read without their image."""

    def captions(self, index: int) -> "Captions":
        """Returns the captions of one sample. Raises BadSample."""


class ByImage:
    """Source of images, each with the captions of all its rows in another source."""

    def __init__(self, source: Captioned, rows: Sequence[Sequence[int]], left_out: LeftOut) -> None:
        self._source, self._rows, self.left_out = source, rows, left_out

    def __len__(self) -> int:
        return len(self._rows)

    def shard_sizes(self) -> list[int]:
        return [len(self._rows)]

    def read(self, index: int) -> RawSample:
        first, *others = self._rows[index]
        sample = self._source.read(first)
        captions = [text for row in others for text in self._source.captions(row).texts]
        return RawSample(sample.key, sample.origin, sample.image, (*sample.captions, *captions))


@runtime_checkable
class InUnits(Protocol):
    """Protocol of a source whose files have several units of order, such as row groups."""

    @property
    def units(self) -> Sequence[int]:
        """Number of units of each file."""


class Numbering:
    """Samples numbered from 0 through shards of the given sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
        self.samples = int(self._ends[-1]) if len(self._ends) else 0

    def size(self, shard: int) -> int:
        """Returns the number of samples of a shard."""
        return int(self._ends[shard]) - (int(self._ends[shard - 1]) if shard else 0)

    def locate(self, index: int) -> tuple[int, int]:
        """Returns the shard and the row within it; raises IndexError if there is no such sample."""
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - (int(self._ends[shard - 1]) if shard else 0)
