"""Pictures of shards with the features that `clipship embed` has written. Imports no torch itself."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.config import Job, is_remote
from trainer.config.stores import Address
from trainer.data.bad_samples import ANY
from trainer.data.feature_files import DTYPES, KEY, SHARD, about_model, read_about, values_in
from trainer.data.files import opened, persistent
from trainer.data.pictures import Decoding, decode
from trainer.data.row_groups import readable
from trainer.data.source import open_source
from trainer.errors import InputError
from trainer.search.index import Features, Index, Model
from trainer.sysinfo.extras import require

if TYPE_CHECKING:
    from PIL import Image

    from trainer.data.sample import Source


class ShardPictures:
    """Samples of shards, which are read when they are shown: implements `trainer.search.index.Pictures`."""

    def __init__(self, path: Path, job: Job, rows: Mapping[str, tuple[str, int]]) -> None:
        """`path` is the folder of the features, `rows` each picture's shard and its number there, by name."""
        self.path, self._job, self._rows = path, job, rows
        self._opened = lru_cache(64)(self._open)

    def place(self, name: str) -> str:
        return name

    def decoded(self, name: str) -> "Image.Image":
        shard, row = self._rows[name]
        return decode(self._opened(shard).read(row), Decoding.by(self._job.data))

    def _open(self, shard: str) -> "Source":
        if is_remote(shard):  # the features' file says so, and it may come from others
            Address.of_data(shard)
        return open_source(self._job.retrieval_data.model_copy(update={"train": (shard,)}), allowed=ANY)


def open_features(model: Model, folder: Path, job: Job) -> Index:
    """Returns the index of the pictures whose features lie in the folder.

    Raises InputError for features of another model than the job's, and if there are none.
    """
    require("pyarrow")
    files = sorted(folder.glob("*.parquet"))
    made_by = {about_model(job, dtype).made_by for dtype in DTYPES}
    if others := [file for file in files if read_about(str(file)).made_by not in made_by]:
        raise InputError(
            f"--features {folder}: {others[0].name} holds features by {read_about(str(others[0])).model}, "
            "which is another model, or other weights of it: search with that one"
        )
    parts = [part for file in files if (part := _read(file))[0]]
    if not parts:
        raise InputError(
            f"--features {folder}: no features of a picture are there: `clipship embed` writes them"
        )
    rows = {name: place for places, _ in parts for name, place in places.items()}
    return Index(
        ShardPictures(folder, job, rows), list(rows), np.concatenate([each for _, each in parts]), model
    )


def _read(file: Path) -> tuple[dict[str, tuple[str, int]], Features]:
    """Returns the places of the pictures of a file by name, and their features; each picture once."""
    table = pictures_in(str(file))
    shards, keys, numbers = (table[name].to_pylist() for name in (SHARD, KEY, "row"))
    return _named(shards, keys, numbers), vectors_of(table["image"])


def pictures_in(file: str) -> Any:
    """Returns the pictures of a file, each once: shard, key, row, caption and image, pyarrow.Table."""
    from pyarrow import compute, parquet

    def read() -> Any:
        with opened(file) as content, readable(file):
            return parquet.read_table(content, columns=[SHARD, KEY, "row", "caption", "image"])

    table = persistent(file, read)
    with readable(file):
        first = compute.equal(table["caption"], 0)
        pictures = table.filter(compute.and_(first, compute.is_valid(table["image"])))
        values_in(pictures["image"])
    return pictures


def _named(shards: Sequence[str], keys: Sequence[str], numbers: Sequence[int]) -> dict[str, tuple[str, int]]:
    """Returns the places of pictures by name; with the row, if the shard has another one of this key."""
    found: dict[str, tuple[str, int]] = {}
    for shard, key, number in zip(shards, keys, numbers, strict=True):
        name = f"{shard}/{key}"
        found[f"{name} (row {number})" if name in found else name] = (shard, number)
    return found


def vectors_of(column: Any) -> Features:
    """Returns the features [n, D] in a column of lists, pyarrow.ChunkedArray. Raises ValueError."""
    return values_in(column).astype(np.float32).reshape(len(column), -1)
