"""Checks the training data that a job names and returns its number of samples, if that is recorded.

Imports no torch.
"""

import os
from collections.abc import Sequence

from trainer.config import Data, is_remote
from trainer.config.formats import FORMATS, SHARDS, FormatRow, row_of
from trainer.data.formats import READERS
from trainer.data.sample_counts import TRAIN
from trainer.data.shard_names import expand_key
from trainer.errors import InputError
from trainer.sysinfo.extras import missing_extra


def check_data(data: Data, key: str = TRAIN) -> int | None:
    """Returns the number of samples; None for shards that no file beside them counts.

    `key` is the job file's key that gave `data.train`. Raises InputError, which lists what is missing or
    unreadable.
    """
    row = FORMATS[data.kind]
    files = expand_key(key, data.train) if row.unit else []
    _check_readable(files, key)
    if data.streams:
        return data.stream_samples
    _check_one_format(files, row, key)
    try:
        return READERS[row.name].check(files, data, key)
    except ModuleNotFoundError as missing:
        if not (remedy := missing_extra(missing.name or "")):
            raise
        raise InputError(
            f"{key}: {remedy}; or leave the data to ranks on other machines: `clipship check` has --no-data "
            "for that, and `clipship submit`, `sweep` and `resume` have --no-check"
        ) from None


def _check_readable(files: Sequence[str], key: str) -> None:
    refused = [file for file in files if not is_remote(file) and not os.access(file, os.R_OK)]
    if refused:
        raise InputError(
            f"{key}: no permission to read {len(refused)} of {len(files)} files, the first is {refused[0]}"
        )


def _check_one_format(files: Sequence[str], row: FormatRow, key: str) -> None:
    """Raises InputError if a file has the ending of another format than `row`."""
    if other := next((file for file in files if row_of(file) not in (row, SHARDS)), None):
        raise InputError(
            f"{key}: {other} is {_a(row_of(other).unit)} among {row.unit}s: name only files of one format "
            f'({", ".join(row.endings) or ".tar"} for data.format = "{row.name}")'
        )


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOU' else 'a'} {noun}"
