"""Counts the samples of training data, as files beside it or an index record them. Imports no torch."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TypeVar

from trainer.config import Data, is_remote
from trainer.data.shard_names import expand_shards
from trainer.errors import InputError
from trainer.safe_io.plain import parse_json, read_json
from trainer.text.wording import many

Result = TypeVar("Result")
TRAIN = "data.train"
ANSWER_S = 10.0
"""Time in seconds in which storage says something of the first shard, or nothing is asked of it."""
CONNECTIONS = 16


def check_shards(files: Sequence[str], data: Data, key: str) -> int | None:
    """Returns the number of samples of an epoch if an index or files beside them count.

    Otherwise the first samples of the first shard are looked at. Raises InputError if the job can use none,
    and for training data of which more is known to be bad than the job allows.
    """
    sizes = None
    if find_spec("numpy"):
        from trainer.data.bad_samples import ANY, Allowed
        from trainer.data.first_look import check_first_samples, indexed_sizes  # imports numpy

        allowed = Allowed.by(data) if key == TRAIN else ANY
        sizes = indexed_sizes(files, data, allowed)
    if sizes is None and not data.filters:
        sizes = recorded_sizes(files)
    if find_spec("numpy") and not any(sizes or ()) and not any(map(is_remote, files)):
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
    """Returns the number of samples of each shard by files beside them; None if any is unknown.

    Those are `sizes.json` ({shard name: samples}), and img2dataset's `NAME_stats.json` and `NAME.parquet`.
    Where shards are behind URLs so are they, and all are asked for if the first is there.
    """
    of_folders: dict[str, Mapping[str, object]] = {}

    def count(shard: str) -> int | None:
        folder, slash, name = shard.rpartition("/")
        if folder not in of_folders:
            of_folders[folder] = _json(f"{folder}{slash}sizes.json")
        found = of_folders[folder].get(name)
        found = _of_shard(shard.removesuffix(".tar")) if found is None else found
        return found if isinstance(found, int) else None

    first = within(ANSWER_S, lambda: count(shards[0])) if is_remote(shards[0]) else count(shards[0])
    if first is None:
        return None
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        counts = [first, *(found for found in pool.map(count, shards[1:]) if found is not None)]
    return counts if len(counts) == len(shards) else None


def within(limit_s: float, call: Callable[[], Result]) -> Result | None:
    """Returns the result of the call; None if it fails, or does not end within the limit.

    Storage that nobody can reach from here may not answer for minutes.
    """
    results: list[Result] = []

    def run() -> None:
        with suppress(Exception):  # clients of object stores raise errors of their own
            results.append(call())

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return next(iter(results), None)


def _of_shard(stem: str) -> object:
    """Returns what img2dataset's files beside a shard say of it."""
    successes = _json(f"{stem}_stats.json").get("successes")
    return _successes_in(f"{stem}.parquet") if successes is None else successes


def _successes_in(table: str) -> int | None:
    """Returns the number of img2dataset's rows whose image was stored; None if there is no such table."""
    if not find_spec("pyarrow") or not (is_remote(table) or os.path.isfile(table)):
        return None
    from pyarrow import parquet

    from trainer.data.files import opened

    with suppress(Exception), opened(table) as file:  # pyarrow and fsspec's clients raise many kinds
        return int(parquet.read_table(file, columns=["status"])["status"].to_pylist().count("success"))
    return None


def samples_of_an_epoch(sizes: Sequence[int], data: Data) -> int:
    """Returns the samples of an epoch, with the job's weights."""
    if data.weights is None:
        return sum(sizes)
    from trainer.data.order import epoch_samples  # imports numpy

    return epoch_samples(sizes, shard_weights(data))


def _json(file: str) -> dict[str, object]:
    """Returns the JSON object in a file, a mere hint beside the data; empty if it cannot be read."""
    from trainer.data.store import read

    try:
        found = parse_json(read(file) or b"{}") if is_remote(file) else read_json(Path(file), links=True)
    except (InputError, OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
