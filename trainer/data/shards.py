"""WebDataset shards as a source: samples read by their place in the file, which an index on disk or in memory knows. No torch."""

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from statistics import median
from typing import Literal, Protocol

from trainer.data.bad import WHOLE, Allowed
from trainer.data.files import Files
from trainer.data.index import THREADS, raise_all, scan
from trainer.data.sample import BadSample, LeftOut, Numbering, RawSample
from trainer.data.tar import Content, Rows, Selection
from trainer.errors import InputError, Unreadable

Meaning = Literal["captions", "label"]
"""What the text member of a sample holds."""

KEYS_OF_JOB = {
    "captions": "data.image_key and data.caption_key",
    "label": "data.image_key and eval.class_key",
}
LOST = "lost in damaged shards, as far as one can tell"
NAMED_IN_ALL = 10_000
"""Of what is left out."""
MAPPED_ROWS = 256
"""Shards whose rows a process keeps mapped: more than a window touches, and bounded."""
ONE_READ = 2**16
"""Bytes between image and text up to which both are read at once: on a network a second request costs more."""


class Counted(Protocol):
    """What is known of a shard before any of it is read: how many samples, and what else it holds."""

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


class Shelf(Protocol):
    """The index of several shards, wherever it is kept."""

    @property
    def paths(self) -> Sequence[str]: ...
    @property
    def entries(self) -> Sequence[Counted]: ...
    @property
    def selection(self) -> Selection: ...
    def rows(self, number: int) -> Rows:
        """Of one shard."""


@dataclass(frozen=True)
class InMemory:
    """An index made now and kept nowhere: for a few shards."""

    selection: Selection
    paths: tuple[str, ...]
    entries: tuple[Content, ...]

    def rows(self, number: int) -> Rows:
        return self.entries[number].rows


class ShardSource:
    """The samples of several shards."""

    def __init__(self, shelf: Shelf, meaning: Meaning) -> None:
        self._shelf = shelf
        self._meaning = meaning
        self._numbering = Numbering(self.shard_sizes())
        self._files = Files()
        self._rows: OrderedDict[int, Rows] = OrderedDict()

    @cached_property
    def left_out(self) -> LeftOut:
        return _left_out(self._shelf)

    def __len__(self) -> int:
        return self._numbering.samples

    def shard_sizes(self) -> list[int]:
        return [len(entry) for entry in self._shelf.entries]

    def read(self, index: int) -> RawSample:
        number, row = self._numbering.locate(index)
        path, rows = self._shelf.paths[number], self._of_shard(number)
        image_at, image_size, text_at, text_size, _ = rows.places[row].item()
        key = rows.key(row)
        try:
            image, text = self._both(path, image_at, image_size, text_at, text_size)
        except InputError as error:
            kind = Unreadable if isinstance(error, Unreadable) else InputError
            raise kind(f"{error} (reading sample {key})") from error
        try:
            if self._meaning == "label":
                return RawSample(key, path, image, (), parse_label(text))
            return RawSample(key, path, image, parse_captions(text))
        except ValueError as error:
            raise BadSample(path, key, f"bad {self._meaning}", str(error)) from error

    def _both(self, path: str, image_at: int, image_size: int, text_at: int, text_size: int) -> tuple[bytes, bytes]:
        """Image and text, with one read where they stand near each other."""
        begin, end = min(image_at, text_at), max(image_at + image_size, text_at + text_size)
        if end - begin > image_size + text_size + ONE_READ:
            return self._files.read(path, image_at, image_size), self._files.read(path, text_at, text_size)
        span = self._files.read(path, begin, end - begin)
        return span[image_at - begin :][:image_size], span[text_at - begin :][:text_size]

    def _of_shard(self, number: int) -> Rows:
        if number not in self._rows:
            self._rows[number] = self._shelf.rows(number)
            if len(self._rows) > MAPPED_ROWS:
                self._rows.popitem(last=False)
        self._rows.move_to_end(number)
        return self._rows[number]

    def __getstate__(self) -> dict[str, object]:
        kept = {name: value for name, value in self.__dict__.items() if name != "left_out"}  # long, and found again where it is asked for
        return {**kept, "_rows": OrderedDict()}


def open_shards(
    paths: Sequence[str],
    image_endings: Sequence[str],
    text_ending: str,
    meaning: Meaning,
    progress: Callable[[int, int], None] | None = None,
    allowed: Allowed = WHOLE,
) -> ShardSource:
    """Index the shards in memory; `progress(shards done, shards)`. InputError naming every bad shard, or where no sample is usable."""
    selection = Selection(tuple(image_endings), text_ending)
    contents: list[Content] = []
    problems: list[InputError] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for done, result in enumerate(pool.map(lambda path: _content_or_problem(path, selection), paths), start=1):
            if isinstance(result, Content):
                contents.append(result)
            else:
                problems.append(result)
            if progress:
                progress(done, len(paths))
    raise_all(problems)
    return open_indexed(InMemory(selection, tuple(paths), tuple(contents)), meaning, allowed)


def open_indexed(shelf: Shelf, meaning: Meaning, allowed: Allowed = WHOLE) -> ShardSource:
    """The samples of shards whose headers were read, mostly into an index on disk: none is opened before one of its samples is read.

    InputError where more is wrong than allowed, or nothing is a sample: then with what the shards hold.
    """
    source = ShardSource(shelf, meaning)
    if not allowed.damage or not len(source):
        raise_all(damages(shelf))
    if not len(source):
        raise InputError(_nothing_usable(shelf, meaning))
    allowed.check(source.left_out, len(source))
    return source


def damages(shelf: Shelf) -> list[InputError]:
    """One for each damaged shard."""
    return [InputError(f"{path}: {entry.damage}") for path, entry in zip(shelf.paths, shelf.entries, strict=True) if entry.damage]


def parse_captions(text: bytes) -> tuple[str, ...]:
    """The lines that are not empty, stripped; ValueError where there is none or the text is not UTF-8."""
    try:
        lines = text.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"captions are not UTF-8 ({error.reason} at byte {error.start})") from error
    captions = tuple(line.strip() for line in lines if line.strip())
    if not captions:
        raise ValueError("captions are empty")
    return captions


def parse_label(text: bytes) -> int:
    """A class number from 0; ValueError for anything else."""
    if not text.strip().isdigit():
        raise ValueError(f"label must be a class number from 0, given {text[:40]!r}")
    return int(text)


def _content_or_problem(path: str, selection: Selection) -> Content | InputError:
    try:
        return scan(path, selection)[1]
    except InputError as error:
        return error


def _left_out(shelf: Shelf) -> LeftOut:
    """What the shards hold besides. How much a cut one has lost is judged by the whole ones beside it, or the largest."""
    counts: Counter[str] = Counter()
    beside: dict[str, list[Counted]] = {}
    for path, entry in zip(shelf.paths, shelf.entries, strict=True):
        counts.update(entry.left_out)
        beside.setdefault(os.path.dirname(path), []).append(entry)
    usual = {folder: _usual(entries) for folder, entries in beside.items()}
    damaged = [(path, entry) for path, entry in zip(shelf.paths, shelf.entries, strict=True) if entry.damage]
    for path, entry in damaged:
        counts[LOST] += max(1, entry.lost or usual[os.path.dirname(path)] - len(entry))
    named = chain(
        (BadSample(path, "", LOST, entry.damage) for path, entry in damaged),
        (BadSample(path, key, cause, cause) for path, entry in zip(shelf.paths, shelf.entries, strict=True) for key, cause in entry.flaws),
    )
    return LeftOut(counts, list(islice(named, NAMED_IN_ALL)))


def _usual(entries: Sequence[Counted]) -> int:
    """Samples of a shard in one folder: what the whole ones have, or the largest."""
    whole = [len(entry) for entry in entries if len(entry) and not entry.damage]
    return round(median(whole)) if whole else max(map(len, entries))


def _nothing_usable(shelf: Shelf, meaning: Meaning) -> str:
    found: Counter[str] = Counter()
    for entry in shelf.entries:
        found.update(entry.endings)
    others = f" and {len(shelf.paths) - 1} more shards" if len(shelf.paths) > 1 else ""
    return nothing_usable(f"{shelf.paths[0]}{others}", found, shelf.selection, meaning)


def nothing_usable(where: str, found: Counter[str], selection: Selection, meaning: Meaning) -> str:
    """What stands there, members counted by ending, and what a sample needs."""
    listed = ", ".join(f".{ending} ({count})" for ending, count in found.most_common(12)) or "no file at all"
    images = ", ".join("." + ending for ending in selection.images)
    return f"{where}: no usable sample. Found {listed}; a sample needs one of {images} and a .{selection.text}. Set {KEYS_OF_JOB[meaning]}"
