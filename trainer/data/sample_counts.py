"""Checks the training data that a job names and returns its number of samples, if that is recorded.

Imports no torch.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from trainer.config import Data, is_remote
from trainer.data.shard_names import expand_key, expand_shards
from trainer.errors import InputError
from trainer.text.paste import word
from trainer.text.wording import many

_TABLES = (".csv", ".tsv")


def check_data(data: Data, key: str = "data.train") -> int | None:
    """Returns the number of samples; None for shards that no file beside them counts.

    `key` is the job file's key that gave `data.train`. Raises InputError, which lists what is missing or
    unreadable.
    """
    if data.kind == "synthetic":
        return data.synthetic_samples
    files = expand_key(key, data.train)
    _check_readable(files, key)
    if data.streams:
        return data.stream_samples
    if data.kind == "table":
        return _check_tables(files, data)
    _check_no_tables(files, key)
    sizes = recorded_sizes(files)
    return None if sizes is None else _of_an_epoch(sizes, data)


def check_streams(streams: Sequence[str], ranks: int) -> None:
    """Raises InputError if there are fewer streams than ranks, since ranks cannot share a stream."""
    if len(streams) < ranks:
        raise InputError(
            f"data.train: {many(len(streams), 'stream')} for {many(ranks, 'rank')}, but ranks cannot share a "
            "stream: name at least one for each rank, for example with braces: pipe:cat part-{0..7}.tar"
        )


def shard_weights(data: Data) -> list[float] | None:
    """Returns how many times an epoch contains the samples of each shard or table; None if once for all."""
    if data.weights is None or data.kind == "synthetic":
        return None
    return [
        weight for name, weight in zip(data.train, data.weights, strict=True) for _ in expand_shards([name])
    ]


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


def _of_an_epoch(sizes: Sequence[int], data: Data) -> int:
    """Returns the samples of an epoch, with the job's weights."""
    if data.weights is None:
        return sum(sizes)
    from trainer.data.order import epoch_samples  # imports numpy

    return epoch_samples(sizes, shard_weights(data))


def _json(file: Path) -> dict[str, object]:
    """Returns the JSON object in a file, a mere hint beside the data; empty if it cannot be read."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _check_readable(files: Sequence[str], key: str) -> None:
    refused = [file for file in files if not is_remote(file) and not os.access(file, os.R_OK)]
    if refused:
        raise InputError(
            f"{key}: no permission to read {len(refused)} of {len(files)} files, the first is {refused[0]}"
        )


def _check_tables(files: Sequence[str], data: Data) -> int:
    # It imports numpy, which no other check needs.
    from trainer.data.tables import list_rows, missing_images, read_table

    rows: list[int] = []
    problems: list[str] = []
    for file in files:
        try:
            table = read_table(
                file, data.image_column, data.caption_column, data.separator, encoding=data.encoding
            )
        except InputError as problem:
            problems.append(str(problem))
            continue
        rows.append(len(table.rows))
        missing = missing_images(table)
        if missing:
            first = table.image_path(table.rows.index(missing[0]))
            problems.append(
                f"{file}: {len(missing)} of {len(table.rows)} image files of column {data.image_column!r} "
                f"are missing: {list_rows(missing)}; the first is {first} (relative paths start at the "
                "table's folder)"
            )
    if problems:
        raise InputError("\n".join(problems))
    return _of_an_epoch(rows, data)


def _check_no_tables(files: Sequence[str], key: str) -> None:
    if parquet := next((file for file in files if file.endswith(".parquet")), None):
        raise InputError(
            f"{key}: {parquet} is not a shard; `clipship pack {word(parquet)} FOLDER` packs its images "
            "into shards"
        )
    tables = [file for file in files if file.endswith(_TABLES)]
    if tables:
        raise InputError(
            f"{key}: {tables[0]} is a table among shards: name only tables or only shards (format = "
            '"webdataset" takes .tar)'
        )
