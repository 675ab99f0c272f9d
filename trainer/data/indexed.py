"""Files with an index: what is known of them before any sample is read. An index in memory. No torch."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, islice
from statistics import median
from typing import Protocol, runtime_checkable

from trainer.data.entry import Content, Entry, Selects
from trainer.data.index import Index, read_each, scan
from trainer.data.sample import BadSample, LeftOut

LOST = "lost in damaged shards, estimated"
NAMED_IN_ALL = 10_000
"""Largest number of left-out samples that are named."""


@runtime_checkable
class Indexed(Protocol):
    """Protocol of a source that reads its samples through an index."""

    @property
    def index(self) -> Index: ...


def index_in_memory(
    paths: Sequence[str], selection: Selects, progress: Callable[[int, int], None] | None = None
) -> Index:
    """Scans the files in threads. `progress` is called with (files done, files).

    Raises InputError, which names every file that cannot be read.
    """
    return in_memory(paths, read_each(paths, lambda path: scan(path, selection), progress))


def in_memory(paths: Sequence[str], found: Sequence[Content]) -> Index:
    """Returns an index of what was found in a few files, which is kept in memory only."""
    stored = tuple(b"".join(content.payload) for content in found)
    return Index(tuple(paths), tuple(content.entry for content in found), stored)


def left_out_of(index: Index) -> LeftOut:
    """Returns the samples that are not used.

    The loss in a cut shard is estimated from the whole shards beside it, or from the largest.
    """
    counts: Counter[str] = Counter()
    beside: dict[str, list[Entry]] = {}
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
    return LeftOut(counts, list(islice(named, NAMED_IN_ALL)), filtered_of(index))


def filtered_of(index: Index) -> Counter[str]:
    """Returns the samples that filters have left out, counted by filter."""
    filtered: Counter[str] = Counter()
    for entry in index.entries:
        filtered.update(entry.filtered)
    return filtered


def _usual(entries: Sequence[Entry]) -> int:
    """Returns the usual number of samples of a shard in one folder.

    It is the median of the whole shards; if there is none, the largest.
    """
    whole = [len(entry) for entry in entries if len(entry) and not entry.damage]
    return round(median(whole)) if whole else max(map(len, entries))
