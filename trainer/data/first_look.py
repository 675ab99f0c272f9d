"""Looks at shards for a check without reading them whole: at their index and first samples. No torch."""

from collections.abc import Sequence
from pathlib import Path

from trainer.config import Data
from trainer.data.files import open_at_once
from trainer.data.index import catalogue_file, index_folder, open_index, stale
from trainer.data.shards import nothing_usable, shard_selection
from trainer.data.tar import read_headers
from trainer.errors import InputError

_SAMPLES = 1000
"""Samples at the begin of a shard that are looked at: milliseconds on a local disk."""


def indexed_sizes(shards: Sequence[str], data: Data) -> list[int] | None:
    """Returns the number of usable samples of each shard from the index that the job names, or beside them.

    Returns None if there is no such index, or if it lacks a shard as it is now.
    """
    selection = shard_selection(data)
    folder = Path(data.index) if data.index else index_folder(shards)
    if folder is None or not catalogue_file(folder, selection).is_file():
        return None
    try:
        if stale(shards, selection, folder):
            return None
        return [len(entry) for entry in open_index(shards, selection, folder).entries]
    except InputError:  # the ranks say more
        return None


def check_first_samples(shard: str, data: Data) -> None:
    """Raises InputError if none of the first samples has the members that the job names.

    A file that cannot be read is left to the ranks, which try again.
    """
    selection = shard_selection(data)
    try:
        with open_at_once(shard) as file:
            content = read_headers(file, selection._replace(filters=()), _SAMPLES)
    except (OSError, InputError):
        return
    if not len(content) and content.endings:
        looked_at = sum(content.left_out.values())
        raise InputError(
            nothing_usable(
                shard,
                content.endings,
                content.left_out,
                selection,
                "captions",
                looked_at if looked_at >= _SAMPLES else None,
            )
        )
