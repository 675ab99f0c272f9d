"""Files with an index: what is known of them before any sample is read. An index in memory. No torch."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from statistics import median
from typing import Protocol, runtime_checkable

from trainer.data.entry import Content, Entry, Selects
from trainer.data.index import THREADS, Index, cancelling, raise_all, scan
from trainer.data.sample import BadSample, LeftOut
from trainer.errors import InputError

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
    found: list[Content] = []
    problems: list[InputError] = []
    with cancelling(ThreadPoolExecutor(THREADS)) as pool:
        results = pool.map(lambda path: _scanned_or_problem(path, selection), paths)
        for done, result in enumerate(results, start=1):
            if isinstance(result, InputError):
                problems.append(result)
            else:
                found.append(result)
            if progress:
                progress(done, len(paths))
    raise_all(problems)
    return in_memory(paths, found)


def in_memory(paths: Sequence[str], found: Sequence[Content]) -> Index:
    """Returns an index of what was found in a few files, which is kept in memory only."""
    stored = tuple(b"".join(content.payload) for content in found)
    return Index(tuple(paths), tuple(content.entry for content in found), stored)


def _scanned_or_problem(path: str, selection: Selects) -> Content | InputError:
    try:
        return scan(path, selection)
    except InputError as error:
        return error


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
