"""Near-duplicates by the features of `clipship embed`: how near each picture is to an earlier one.

A vector that is near an earlier one is a near-duplicate of it, whatever threshold is chosen later. All pairs
are compared, or lists of faiss, whose recall is measured. The table that is written is one that
`data.scores` takes.
"""

import io
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.comm.accelerator import chosen, runtime, usable_devices
from trainer.data.feature_files import KEY, SHARD, read_about
from trainer.data.store import names, put
from trainer.errors import InputError
from trainer.search.features import pictures_in, vectors_of
from trainer.sysinfo.extras import require
from trainer.text.wording import many

Vectors = NDArray[np.float32]
"""Unit vectors [n, D]."""
Tell = Callable[[int], object]
"""Function that is told how many vectors are done."""
NONE = -1
"""Number of the nearest one, and cosine, of the first vector, before which there is none."""
BLOCK, OTHERS = 4096, 65_536
"""Vectors that are compared at once, and the earlier ones with which they are: 1 GiB of cosines."""
TRAINING = 64
"""Vectors by which faiss finds the middle of each list."""
LOOKED = 1 / 16
"""Share of the lists that are looked into."""
SAMPLE = 2000
"""Vectors of which the exact answer is computed to measure recall."""


class Nearest(NamedTuple):
    """Largest cosine of each vector with an earlier one."""

    cosines: Vectors
    """[n]"""
    numbers: NDArray[np.int64]
    """Number of that earlier one, [n]."""


def exact(vectors: Vectors, tell: Tell) -> Nearest:
    """Compares all pairs, on the GPU if there is one and the vectors fit into its memory."""
    device = _device(vectors.nbytes)
    every = torch.from_numpy(vectors).to(device)
    found = _none(len(vectors))
    for begin in range(0, len(vectors), BLOCK):
        rows = torch.arange(begin, min(begin + BLOCK, len(vectors)), device=device)
        _put(found, rows, *_nearest_before(every, rows))
        tell(int(rows[-1]) + 1)
    return found


def by_lists(vectors: Vectors, tell: Tell) -> Nearest:
    """Compares each vector with those of the lists of faiss that are nearest to it; some pairs are missed."""
    index = _trained(vectors)
    found = _none(len(vectors))
    for begin in range(0, len(vectors), BLOCK):
        block = vectors[begin : begin + BLOCK]
        rows = torch.arange(begin, begin + len(block))
        # Those of the block are not in the index yet, so that none is its own neighbour or a later one's.
        _put(found, rows, *_nearest_before(torch.from_numpy(block), torch.arange(len(block)), begin))
        if begin:
            cosines, numbers = (values[:, 0] for values in index.search(block, 1))
            nearer = cosines > found.cosines[begin : begin + len(block)]
            found.cosines[begin : begin + len(block)][nearer] = cosines[nearer]
            found.numbers[begin : begin + len(block)][nearer] = numbers[nearer]
        index.add(block)
        tell(begin + len(block))
    return found


def recall(vectors: Vectors, found: Nearest, thresholds: Sequence[float]) -> list[float]:
    """Returns, for each cosine, the share of the near-duplicates as near as that which were found as such.

    Exact answers are computed for SAMPLE vectors; NaN if no near-duplicate is among them.
    """
    chosen = np.random.default_rng(0).choice(len(vectors), min(SAMPLE, len(vectors)), replace=False)
    rows = np.sort(chosen)
    exact_cosines = _nearest_before(torch.from_numpy(vectors), torch.from_numpy(rows))[0].numpy()

    def share(least: float) -> float:
        true = exact_cosines >= least
        return float((found.cosines[rows][true] >= least).mean()) if true.any() else math.nan

    return [share(least) for least in thresholds]


def exact_seconds(vectors: Vectors) -> float:
    """Returns about how long `exact` takes here, from a product of one block."""
    device = _device(vectors.nbytes)
    block = torch.from_numpy(vectors[:BLOCK]).to(device)
    (block @ block.T).amax().item()
    began = time.monotonic()
    (block @ block.T).amax(dim=1).amax().item()
    return (time.monotonic() - began) / len(block) ** 2 * len(vectors) ** 2 / 2


def _nearest_before(vectors: Tensor, rows: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
    """Returns the largest cosine of some rows, in order, with an earlier vector; its number + `offset`."""
    own = vectors[rows]
    cosines = torch.full((len(rows),), float(NONE), device=vectors.device)
    numbers = torch.full((len(rows),), NONE, device=vectors.device)
    for begin in range(0, int(rows[-1]), OTHERS):
        others = torch.arange(begin, min(begin + OTHERS, int(rows[-1])), device=vectors.device)
        found = own @ vectors[begin : begin + len(others)].T
        if int(others[-1]) >= int(rows[0]):
            found.masked_fill_(others[None, :] >= rows[:, None], -torch.inf)
        largest, places = found.max(dim=1)
        nearer = largest > cosines
        cosines = torch.where(nearer, largest, cosines)
        numbers = torch.where(nearer, others[places] + offset, numbers)
    return cosines, numbers


def _trained(vectors: Vectors) -> Any:
    """Returns an index of faiss, with as many lists as is usual for so many vectors, which has none yet."""
    require("faiss")
    import faiss

    lists = max(1, min(int(4 * math.sqrt(len(vectors))), len(vectors) // TRAINING))
    index = faiss.IndexIVFFlat(
        faiss.IndexFlatIP(vectors.shape[1]), vectors.shape[1], lists, faiss.METRIC_INNER_PRODUCT
    )
    sample = np.random.default_rng(0).choice(len(vectors), min(len(vectors), TRAINING * lists), replace=False)
    index.train(vectors[np.sort(sample)])
    index.nprobe = max(1, int(lists * LOOKED))
    return index


def _device(size: int) -> torch.device:
    row = chosen(None)
    device = torch.device(row.device_type)
    if usable_devices(row):
        free, _ = runtime(device).mem_get_info()
        if free > size + 4 * 4 * BLOCK * OTHERS:
            return device
    return torch.device("cpu")


def _none(count: int) -> Nearest:
    return Nearest(np.full(count, NONE, np.float32), np.full(count, NONE, np.int64))


def _put(found: Nearest, rows: Tensor, cosines: Tensor, numbers: Tensor) -> None:
    begin, end = int(rows[0]), int(rows[-1]) + 1
    found.cosines[begin:end], found.numbers[begin:end] = cosines.cpu().numpy(), numbers.cpu().numpy()


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
