"""WebDataset shards as a source: samples are read by their offset in the file. No torch.

The offsets come from an index on disk or in memory.
"""

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from statistics import median
from typing import Literal, Protocol

from trainer.data.bad_samples import WHOLE, Allowed
from trainer.data.captions import LINES, CaptionReader
from trainer.data.files import Files
from trainer.data.index import THREADS, raise_all, scan
from trainer.data.sample import MOST_BYTES, BadSample, LeftOut, Numbering, RawSample, check_bytes
from trainer.data.tar import Content, Rows, Selection
from trainer.errors import InputError, StorageError
from trainer.text.wording import many

Meaning = Literal["captions", "label"]
"""Kind of content of a sample's text member."""

KEYS_OF_JOB = {
    "captions": "data.image_key and data.caption_key",
    "label": "data.image_key and eval.class_key",
}
LOST = "lost in damaged shards, estimated"
NAMED_IN_ALL = 10_000
"""Largest number of left-out samples that are named."""
MAPPED_ROWS = 256
"""Number of shards whose rows a process keeps mapped: more than a window touches, and bounded."""
ONE_READ = 2**16
"""Largest gap in bytes between image and text that are read at once: on a network a second request costs
more.
"""


class Counted(Protocol):
    """Counts of a shard that are known before any sample is read: its samples and what else it holds."""

    @property
    def left_out(self) -> Mapping[str, int]: ...
    @property
    def flaws(self) -> Sequence[tuple[str, str]]: ...
    @property
    def damage(self) -> str: ...
    @property
    def lost(self) -> int: ...
    @property
    def endings(self) -> Mapping[str, int]: ...
    def __len__(self) -> int: ...


class ShardIndex(Protocol):
    """Protocol of an index of several shards, on disk or in memory."""

    @property
    def paths(self) -> Sequence[str]: ...
    @property
    def entries(self) -> Sequence[Counted]: ...
    @property
    def selection(self) -> Selection: ...
    def rows(self, number: int) -> Rows:
        """Returns the rows of one shard."""


@dataclass(frozen=True)
class IndexInMemory:
    """An index that is made now and kept in memory only, for a few shards."""

    selection: Selection
    paths: tuple[str, ...]
    entries: tuple[Content, ...]

    def rows(self, number: int) -> Rows:
        return self.entries[number].rows


class ShardSource:
    """Source of the samples of several shards."""

    def __init__(
        self,
        index: ShardIndex,
        meaning: Meaning,
        most_bytes: int = MOST_BYTES,
        captions: CaptionReader = LINES,
    ) -> None:
        self._index = index
        self._meaning = meaning
        self._captions = captions
        self._most_bytes = most_bytes
        self._numbering = Numbering(self.shard_sizes())
        self._files = Files()
        self._rows: OrderedDict[int, Rows] = OrderedDict()

    @cached_property
    def left_out(self) -> LeftOut:
        return _left_out(self._index)

    def __len__(self) -> int:
        return self._numbering.samples

    def shard_sizes(self) -> list[int]:
        return [len(entry) for entry in self._index.entries]

    def read(self, index: int) -> RawSample:
        number, row = self._numbering.locate(index)
        path, rows = self._index.paths[number], self._of_shard(number)
        image_at, image_size, text_at, text_size, _ = rows.places[row].item()
        key = rows.key(row)
        check_bytes(path, key, "image", image_size, self._most_bytes)
        check_bytes(path, key, f".{self._index.selection.text}", text_size, self._most_bytes)
        try:
            image, text = self._both(path, image_at, image_size, text_at, text_size)
        except InputError as error:
            kind = StorageError if isinstance(error, StorageError) else InputError
            raise kind(f"{error} (reading sample {key})") from error
        try:
            if self._meaning == "label":
                return RawSample(key, path, image, (), parse_label(text))
            return RawSample(key, path, image, self._captions(text))
        except ValueError as error:
            raise BadSample(path, key, f"bad {self._meaning}", str(error)) from error

    def _both(
        self, path: str, image_at: int, image_size: int, text_at: int, text_size: int
    ) -> tuple[bytes, bytes]:
        """Returns image and text, with one read if they are near each other."""
        begin, end = min(image_at, text_at), max(image_at + image_size, text_at + text_size)
        if end - begin > image_size + text_size + ONE_READ:
            return self._files.read(path, image_at, image_size), self._files.read(path, text_at, text_size)
        span = self._files.read(path, begin, end - begin)
        return span[image_at - begin :][:image_size], span[text_at - begin :][:text_size]

    def _of_shard(self, number: int) -> Rows:
        if number not in self._rows:
            self._rows[number] = self._index.rows(number)
            if len(self._rows) > MAPPED_ROWS:
                self._rows.popitem(last=False)
        self._rows.move_to_end(number)
        return self._rows[number]

    def __getstate__(self) -> dict[str, object]:
        # `left_out` is long, and is computed again where it is needed.
        kept = {name: value for name, value in self.__dict__.items() if name != "left_out"}
        return {**kept, "_rows": OrderedDict()}


def open_shards(
    paths: Sequence[str],
    image_endings: Sequence[str],
    text_ending: str,
    meaning: Meaning,
    progress: Callable[[int, int], None] | None = None,
    allowed: Allowed = WHOLE,
    most_bytes: int = MOST_BYTES,
    captions: CaptionReader = LINES,
) -> ShardSource:
    """Indexes the shards in memory and returns their samples.

    `progress` is called with (shards done, shards). Raises InputError, which names every bad shard, or if no
    sample is usable.
    """
    selection = Selection(tuple(image_endings), text_ending)
    contents: list[Content] = []
    problems: list[InputError] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for done, result in enumerate(
            pool.map(lambda path: _content_or_problem(path, selection), paths), start=1
        ):
            if isinstance(result, Content):
                contents.append(result)
            else:
                problems.append(result)
            if progress:
                progress(done, len(paths))
    raise_all(problems)
    index = IndexInMemory(selection, tuple(paths), tuple(contents))
    return open_indexed(index, meaning, allowed, most_bytes, captions)


def open_indexed(
    index: ShardIndex,
    meaning: Meaning,
    allowed: Allowed = WHOLE,
    most_bytes: int = MOST_BYTES,
    captions: CaptionReader = LINES,
) -> ShardSource:
    """Returns the samples of shards whose headers are indexed.

    A shard is opened when its first sample is read. A sample with a member of more than `most_bytes` is a
    BadSample when it is read. Raises InputError if more is wrong than allowed, or if no sample is usable:
    then it says what the shards hold.
    """
    source = ShardSource(index, meaning, most_bytes, captions)
    if not allowed.damage or not len(source):
        raise_all(damages(index))
    if not len(source):
        raise InputError(_nothing_usable(index, meaning))
    allowed.check(source.left_out, len(source))
    return source


def damages(index: ShardIndex) -> list[InputError]:
    """Returns one error for each damaged shard."""
    return [
        InputError(f"{path}: {entry.damage}")
        for path, entry in zip(index.paths, index.entries, strict=True)
        if entry.damage
    ]


def parse_label(text: bytes) -> int:
    """Returns a class number from 0; raises ValueError for anything else."""
    if not text.strip().isdigit():
        raise ValueError(f"label must be a class number from 0, given {text[:40]!r}")
    return int(text)


def _content_or_problem(path: str, selection: Selection) -> Content | InputError:
    try:
        return scan(path, selection)[1]
    except InputError as error:
        return error


def _left_out(index: ShardIndex) -> LeftOut:
    """Returns the samples that cannot be used.

    The loss in a cut shard is estimated from the whole shards beside it, or from the largest.
    """
    counts: Counter[str] = Counter()
    beside: dict[str, list[Counted]] = {}
    for path, entry in zip(index.paths, index.entries, strict=True):
        counts.update(entry.left_out)
        beside.setdefault(os.path.dirname(path), []).append(entry)
    usual = {folder: _usual(entries) for folder, entries in beside.items()}
    damaged = [(path, entry) for path, entry in zip(index.paths, index.entries, strict=True) if entry.damage]
    for path, entry in damaged:
        counts[LOST] += max(1, entry.lost or usual[os.path.dirname(path)] - len(entry))
    named = chain(
        (BadSample(path, "", LOST, entry.damage) for path, entry in damaged),
        (
            BadSample(path, key, cause, cause)
            for path, entry in zip(index.paths, index.entries, strict=True)
            for key, cause in entry.flaws
        ),
    )
    return LeftOut(counts, list(islice(named, NAMED_IN_ALL)))


def _usual(entries: Sequence[Counted]) -> int:
    """Returns the usual number of samples of a shard in one folder.

    It is the median of the whole shards; if there is none, the largest.
    """
    whole = [len(entry) for entry in entries if len(entry) and not entry.damage]
    return round(median(whole)) if whole else max(map(len, entries))


def _nothing_usable(index: ShardIndex, meaning: Meaning) -> str:
    endings: Counter[str] = Counter()
    for entry in index.entries:
        endings.update(entry.endings)
    others = f" and {many(len(index.paths) - 1, 'more shard')}" if len(index.paths) > 1 else ""
    return nothing_usable(f"{index.paths[0]}{others}", endings, index.selection, meaning)


def nothing_usable(where: str, endings: Counter[str], selection: Selection, meaning: Meaning) -> str:
    """Returns a message: the members found, counted by ending, and what a sample needs."""
    listed = ", ".join(f".{ending} ({count})" for ending, count in endings.most_common(12)) or "no files"
    images = ", ".join("." + ending for ending in selection.images)
    return (
        f"{where}: no usable sample. Found {listed}; a sample needs one of {images} and a .{selection.text}. "
        f"Set {KEYS_OF_JOB[meaning]}"
    )
