"""Checks the training data that a job names and returns its number of samples, if that is recorded.

Imports no torch.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from trainer.config import Data, is_remote
from trainer.config.formats import FORMATS, SHARDS, FormatRow, row_of
from trainer.data.shard_names import expand_key, expand_shards
from trainer.errors import InputError
from trainer.safe_io.plain import read_json
from trainer.sysinfo.extras import missing_extra
from trainer.sysinfo.imports import load
from trainer.text.wording import many

TRAIN = "data.train"


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
        counted: int | None = load(row.check)(files, data, key)
    except ModuleNotFoundError as missing:
        if not (remedy := missing_extra(missing.name or "")):
            raise
        raise InputError(
            f"{key}: {remedy}; or leave the data to the ranks, by `clipship check --no-data` and `clipship "
            "submit --no-check`"
        ) from None
    return counted


def check_synthetic(_files: Sequence[str], data: Data, _key: str) -> int:
    """Returns the number of made-up samples: a check of FORMATS."""
    return data.synthetic_samples


def check_shards(files: Sequence[str], data: Data, key: str) -> int | None:
    """Returns the number of samples of an epoch if an index or files beside them count: a check of FORMATS.

    Otherwise the first samples of the first shard are looked at. Raises InputError if the job can use none,
    and for training data of which more is known to be bad than the job allows.
    """
    sizes = None if data.filters else recorded_sizes(files)
    if find_spec("numpy") and not any(map(is_remote, files)):
        from trainer.data.bad_samples import ANY, Allowed
        from trainer.data.first_look import check_first_samples, indexed_sizes  # imports numpy

        allowed = Allowed.by(data) if key == TRAIN else ANY
        if (indexed := indexed_sizes(files, data, allowed)) is not None:
            sizes = indexed
        elif not any(sizes or ()):
            check_first_samples(files, data, allowed)
    return None if sizes is None else samples_of_an_epoch(sizes, data)


def check_streams(streams: Sequence[str], ranks: int) -> None:
    """Raises InputError if there are fewer streams than ranks, since ranks cannot share a stream."""
    if len(streams) < ranks:
        raise InputError(
            f"data.train: {many(len(streams), 'stream')} for {many(ranks, 'rank')}, but ranks cannot share a "
            "stream: name at least one for each rank, for example with braces: pipe:cat part-{0..7}.tar"
        )


def shard_weights(data: Data, units: Sequence[int] | None = None) -> list[float] | None:
    """Returns how many times an epoch contains the samples of each shard or table; None if once for all.

    With `units`, the number of row groups of each table, it is a weight for each row group.
    """
    if data.weights is None or not data.train:
        return None
    of_files = [
        weight for name, weight in zip(data.train, data.weights, strict=True) for _ in expand_shards([name])
    ]
    units = [1] * len(of_files) if units is None else units
    return [weight for weight, count in zip(of_files, units, strict=True) for _ in range(count)]


def recorded_sizes(shards: Sequence[str]) -> list[int] | None:
    """Returns the number of samples of each shard; None if any is unknown.

    The sources, beside each shard, are `sizes.json` ({shard name: samples}) and img2dataset's
    `NAME_stats.json`.
    """
    counts: list[int] = []
    sizes: dict[Path, dict[str, object]] = {}
    for shard in map(Path, shards):
        if shard.parent not in sizes:
            sizes[shard.parent] = _json(shard.parent / "sizes.json")
        count = sizes[shard.parent].get(shard.name)
        if count is None:
            count = _json(shard.parent / f"{shard.stem}_stats.json").get("successes")
        if not isinstance(count, int):
            return None
        counts.append(count)
    return counts


def samples_of_an_epoch(sizes: Sequence[int], data: Data) -> int:
    """Returns the samples of an epoch, with the job's weights."""
    if data.weights is None:
        return sum(sizes)
    from trainer.data.order import epoch_samples  # imports numpy

    return epoch_samples(sizes, shard_weights(data))


def _json(file: Path) -> dict[str, object]:
    """Returns the JSON object in a file, a mere hint beside the data; empty if it cannot be read."""
    try:
        read = read_json(file, links=True)
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


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
