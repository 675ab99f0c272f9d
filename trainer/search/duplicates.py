"""Near-duplicates by the features of `clipship embed`: how near each picture is to an earlier one.

The table that is written is one that `data.scores` takes. Imports no torch itself.
"""

import io
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from trainer.data.feature_files import KEY, SHARD, read_about
from trainer.data.store import names, put
from trainer.errors import InputError
from trainer.search.features import pictures_in, vectors_of
from trainer.search.nearest import Nearest, Vectors, by_lists, exact, exact_seconds, recall
from trainer.sysinfo.extras import require
from trainer.text.wording import many

NEAREST = "nearest"
"""Column of the largest cosine with an earlier picture; -1 where there is none."""
THRESHOLDS = (0.9, 0.95, 0.98, 0.995)
"""Cosines for which near-duplicates are counted."""
MOST_SECONDS = 600.0
"""Time for which all pairs are compared, unless a method is asked for."""
Method = Literal["exact", "lists"]
METHODS: dict[Method, Callable[[Vectors, Callable[[int], object]], Nearest]] = {
    "exact": exact,
    "lists": by_lists,
}


class Pictures(NamedTuple):
    """Pictures that have features, in the order of their files' names and rows."""

    places: Any
    """Columns shard, key and row, pyarrow.Table."""
    vectors: Vectors


def read_pictures(folder: str) -> Pictures:
    """Returns the pictures in a folder of features, or an address; each once, whatever captions it has.

    Raises InputError if there are none, or if they are of several models.
    """
    require("pyarrow")
    import pyarrow

    files = [f"{folder}/{name}" for name in names(folder) if name.endswith(".parquet")]
    abouts = list(map(read_about, files))
    models = {about.made_by: about.model for about in abouts}
    if any(about.views for about in abouts):
        raise InputError(f"{folder} holds features of views, not of whole pictures: embed without --views")
    if len(models) > 1:
        raise InputError(
            f"{folder} holds features of {many(len(models), 'model')}, which cannot be compared: "
            f"{'; '.join(models.values())}"
        )
    tables = [table for file in files if (table := pictures_in(file)).num_rows]
    if not tables:
        raise InputError(f"{folder}: no features of a picture are there: `clipship embed` writes them")
    places = [table.select([SHARD, KEY, "row"]).unify_dictionaries() for table in tables]
    vectors = np.concatenate([vectors_of(table["image"]) for table in tables])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)  # in fp16 they are not quite unit vectors
    return Pictures(pyarrow.concat_tables(places), vectors)


def method_for(vectors: Vectors) -> Method:
    """Returns the method that takes MOST_SECONDS at most here: all pairs, or the lists of faiss."""
    return "exact" if exact_seconds(vectors) <= MOST_SECONDS else "lists"


def found_share(vectors: Vectors, found: Nearest, method: Method) -> dict[str, float]:
    """Returns the share of the near-duplicates that the method found, by cosine."""
    shares = [1.0] * len(THRESHOLDS) if method == "exact" else recall(vectors, found, THRESHOLDS)
    return {f"{least:g}": share for least, share in zip(THRESHOLDS, shares, strict=True)}


def counts(found: Nearest) -> dict[str, int]:
    """Returns the number of pictures that are as near as this to an earlier one, by cosine."""
    return {f"{least:g}": int((found.cosines >= least).sum()) for least in THRESHOLDS}


def write_table(pictures: Pictures, found: Nearest, out: str) -> None:
    """Writes shard, key, row, nearest, of_shard and of_key of each picture. Raises InputError."""
    import pyarrow
    from pyarrow import parquet

    earlier = pyarrow.array(found.numbers, mask=found.numbers < 0)
    table = pictures.places.append_column(NEAREST, pyarrow.array(found.cosines))
    for name in (SHARD, KEY):
        table = table.append_column(f"of_{name}", pictures.places[name].take(earlier))
    content = io.BytesIO()
    parquet.write_table(table, content, compression="zstd")
    put(content.getvalue(), out)
