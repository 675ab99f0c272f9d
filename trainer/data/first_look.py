"""Looks at shards for a check without reading them whole: at their index and first samples. No torch."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import filterfalse
from pathlib import Path

from trainer.config import Data, is_remote
from trainer.data.bad_samples import Allowed
from trainer.data.captions import MOST_JSON_BYTES, CaptionReader
from trainer.data.entry import Content
from trainer.data.files import open_at_once
from trainer.data.index import catalogue_file, index_folder, open_index, stale
from trainer.data.indexed import in_memory
from trainer.data.shards import nothing_usable, open_indexed, shard_selection
from trainer.data.tar import Rows, Selection, read_headers
from trainer.errors import InputError
from trainer.text.wording import many

_KEYS = 1000
"""Keys at the begin of a shard that are looked at: milliseconds on a local disk."""


def indexed_sizes(shards: Sequence[str], data: Data, allowed: Allowed) -> list[int] | None:
    """Returns the number of usable samples of each shard from the index that the job names, or beside them.

    Returns None if there is no such index, or if it lacks a shard as it is now; whether one behind a URL has
    changed is left to the ranks. Raises InputError, as a run does, if more is wrong with the shards than is
    allowed.
    """
    selection = shard_selection(data)
    folder = Path(data.index) if data.index else index_folder(shards)
    if folder is None or not catalogue_file(folder, selection).is_file():
        return None
    try:
        if stale(list(filterfalse(is_remote, shards)), selection, folder, adopt=False):
            return None
        index = open_index(shards, selection, folder)
    except InputError:  # the ranks say more
        return None
    return open_indexed(index, selection, "captions", allowed).shard_sizes()


def first_content(shard: str, data: Data) -> Content | None:
    """Returns the first samples of a shard; None if it cannot be read, which is left to the ranks."""
    selection = shard_selection(data)._replace(filters=(), scores=None)
    try:
        status = os.stat(shard)
        return _first_content(shard, selection, status.st_size, status.st_mtime_ns)
    except (OSError, InputError):
        return None


@lru_cache(maxsize=1)
def _first_content(shard: str, selection: Selection, _size: int, _mtime_ns: int) -> Content:
    """Reads a shard's first headers; several questions of one check are about them."""
    with open_at_once(shard) as file:
        return read_headers(file, selection, _KEYS)


def check_first_samples(shards: Sequence[str], data: Data, allowed: Allowed) -> None:
    """Raises InputError if none of the first samples has the members that the job names.

    It is also raised if a single shard is that short that it was read whole, and the run would refuse it.
    """
    if (content := first_content(shards[0], data)) is None:
        return
    selection = shard_selection(data)
    found = content.entry
    looked_into = [first_content(shard, data) for shard in shards[:3]]
    if all(each and each.entry.damage and not each.entry.endings for each in looked_into):
        raise InputError(f"{shards[0]}: {found.damage}")
    if not len(found) and found.endings:
        looked_at = None if content.whole else sum(found.left_out.values())
        raise InputError(
            nothing_usable(shards[0], found.endings, found.left_out, selection, "captions", looked_at)
        )
    if content.whole and len(shards) == 1 and not data.filters:
        open_indexed(in_memory(shards, [content]), selection, "captions", allowed)


def captions_of_shard(shard: str, data: Data) -> Iterator[str]:
    """Yields the captions of a shard's first samples; a bad sample has none."""
    read, most = CaptionReader.by(data), min(data.max_member_bytes, MOST_JSON_BYTES)
    if (content := first_content(shard, data)) is None:
        return
    with open_at_once(shard) as file:
        for place in Rows.of(b"".join(content.payload), len(content.entry)).places:
            if place["text_size"] <= most:
                file.seek(int(place["text_at"]))
                with suppress(ValueError):
                    yield from read(file.read(int(place["text_size"]))).texts


def groups_of_shard(shard: str, data: Data) -> Iterator[int]:
    """Yields the number of the group of each of a shard's first samples."""
    if (content := first_content(shard, data)) is not None:
        rows = Rows.of(b"".join(content.payload), len(content.entry))
        yield from map(rows.group, range(len(rows)))


def left_out_first(shard: str, data: Data) -> str:
    """Returns what of a shard's first samples is not usable, and why; empty if all are."""
    content = first_content(shard, data)
    if content is None or not content.entry.left_out:
        return ""
    causes = "; ".join(f"{count:,} with {cause}" for cause, count in content.entry.left_out.items())
    count = sum(content.entry.left_out.values())
    first = "" if content.whole else "first "
    of = many(len(content.entry) + count, "sample")
    return f"{shard}: {count:,} of its {first}{of} are not used: {causes}"
