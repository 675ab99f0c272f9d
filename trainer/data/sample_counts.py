"""Counts the samples of training data, as files beside it or an index record them. Imports no torch."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from trainer.config import Data, is_remote
from trainer.data.shard_names import expand_shards
from trainer.errors import InputError
from trainer.safe_io.plain import read_json
from trainer.text.wording import many

TRAIN = "data.train"


def check_shards(files: Sequence[str], data: Data, key: str) -> int | None:
    """Returns the number of samples of an epoch if an index or files beside them count.

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
