"""Files of features, as `clipship embed` writes them: Parquet, one for each shard, or none yet. No torch.

A row is a caption of a sample: shard, key, row, caption, image, text, cosine, problem. The image's feature
is that of the whole picture, or there is one for each of several views. A sample that cannot
be used has one row, with its problem and neither features nor cosine. The file's metadata say by which
model, and of which version of the shard. pyarrow is imported when a file is written or read.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from trainer.config import Data, Job, is_remote
from trainer.config.formats import FORMATS
from trainer.config.stores import WEB
from trainer.data.entry import Count
from trainer.data.files import Stamp, opened, persistent, stamp
from trainer.data.index import THREADS
from trainer.data.row_groups import readable
from trainer.data.shard_names import expand_names
from trainer.data.store import names, put
from trainer.errors import InputError
from trainer.run.model_identity import model_identity
from trainer.safe_io.plain import parse_json
from trainer.text.masking import masked
from trainer.text.wording import many

Vectors = NDArray[np.floating[Any]]
FOLDER = "features"
"""Folder beside a shard that has its features, unless another one is named."""
KEY, SHARD, COSINE = "key", "shard", "cosine"
"""Columns by which samples are found, and that of their scores."""
GROUP_BYTES = 2**20
"""Features in a row group, at least, unless the file ends: a group is what is read for some samples."""
ABOUT = "clipship"
"""Key of the metadata that say what the features are."""
Dtype = Literal["fp16", "fp32"]
DTYPES: Mapping[Dtype, type] = {"fp16": np.float16, "fp32": np.float32}
_NAME_BYTES = 255
"""Largest number of bytes of a file's name."""
FORMAT = 1
"""Number that changes with the way in which features are computed."""
READ_BY = (
    "image_key", "image_column", "caption_key", "caption_column", "caption_template", "caption_lines",
    "encoding"
)  # fmt: skip
"""Keys of [data] that say what a sample's image and captions are, and which of them is the first."""


Factor = Annotated[float, Field(ge=-1e6, le=1e6)]
"""Logit scale or bias: those of models are some hundreds at most."""


@dataclass(frozen=True)
class About:
    """Content of the metadata of a file of features."""

    made_by: str
    """Digest of the model, its weights and the type of the features."""
    model: str
    """The same in words."""
    size: Count
    """Bytes of the shard and its time of change when it was read."""
    changed: str
    samples: Count = 0
    """Samples that have features."""
    rows: Count = 0
    bad: Mapping[str, Count] = field(default_factory=dict)
    """Samples that have none, by cause."""
    width: Count = 0
    """Number of a feature's values; 0 until the model is built."""
    logit_scale: Factor = 0.0
    """Factor by which the model multiplies cosines, and what it adds then; None: it adds nothing."""
    logit_bias: Factor | None = None
    read_by: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the job by which samples were read, of those that tell one picture and caption from another."""
    views: Count = 0
    """Pictures of each sample, as training augments them, that have features; 0: the whole picture has."""

    def is_of(self, version: Stamp) -> bool:
        """Returns whether the features are those of this version of the shard."""
        return (self.size, self.changed) == version


_ABOUT = TypeAdapter(About)


def about_model(job: Job, dtype: Dtype, views: int = 0) -> About:
    """Returns what files say of the job's model; the shard's version is not there yet."""
    identity = json.dumps([FORMAT, *model_identity(job), dtype, *([views] if views else [])])
    weights = f" with {Path(job.model.pretrained).name}" if job.model.pretrained else ""
    of_views = f" for {many(views, 'view')}" if views else ""
    words = f"{Path(job.model.name).name}{weights} in {job.model.precision}, stored in {dtype}{of_views}"
    made_by = hashlib.sha256(identity.encode()).hexdigest()[:32]
    return About(made_by, words, 0, "", views=views, read_by=read_by(job.retrieval_data, job.seed, views))


def read_by(data: Data, seed: int, views: int) -> dict[str, Any]:
    """Returns the keys of READ_BY that the data's format reads, and those that views follow from.

    Their values are as JSON has them.
    """
    keys = {key for key in READ_BY if key in FORMATS[data.kind].reads}
    read = data.model_dump(mode="json", include=keys | ({"crop_scale", "augment"} if views else set()))
    return {**{f"data.{key}": value for key, value in read.items()}, **({"seed": seed} if views else {})}


class FeatureRows(NamedTuple):
    """Rows of one shard, in order."""

    numbers: NDArray[np.int64]
    """Numbers of the samples in their shard, from 0; a sample with several captions has several rows."""
    captions: NDArray[np.int64]
    """Number of each row's caption among those of its sample."""
    keys: NDArray[np.object_]
    problems: NDArray[np.object_]
    """Why a sample has no features; its other values then mean nothing."""
    images: NDArray[np.float32]
    """Unit vectors [rows, D], or of views [rows, views, D]."""
    texts: NDArray[np.float32]
    cosines: NDArray[np.float32]


def feature_files(shards: Sequence[str], out: str | None) -> dict[str, str]:
    """Returns the path or address of each shard's features: in `out`, or in a folder beside the shard.

    Raises InputError if two shards would have the same one, or if nothing can be written there.
    """
    files = {shard: _file_of(shard, out) for shard in shards}
    owners: dict[str, str] = {}
    for shard, file in files.items():
        if file.startswith(WEB):
            raise InputError(
                f"{masked(file)}: a web server takes no files: give a folder, or an address of object "
                "storage, with --out"
            )
        if not is_remote(file) and len(os.fsencode(os.path.basename(file))) > _NAME_BYTES:
            raise InputError(
                f"{masked(shard)}: the name of its file of features is too long for a file system: give the "
                "shard another"
            )
        if (other := owners.setdefault(file, shard)) != shard:
            raise InputError(
                f"{masked(other)} and {masked(shard)} would both have their features in {file}: embed the "
                "shards of each folder by themselves, with another --out"
            )
    return files


def _file_of(shard: str, out: str | None) -> str:
    folder, slash, name = shard.partition("?")[0].rpartition("/")
    return f"{out.rstrip('/') if out else f'{folder}{slash}{FOLDER}'}/{stem(name)}.parquet"


def folder_named(pattern: str) -> str:
    """Returns the one folder, here or at an address, that a pattern names; "" if it names something else."""
    if is_remote(pattern):
        folder = pattern.rstrip("/")
        return "" if "." in folder.rpartition("/")[2] else folder
    found = expand_names(pattern)
    return found[0] if len(found) == 1 and os.path.isdir(found[0]) else ""


def files_in(folder: str, shards: Sequence[str], key: str) -> tuple[str, ...]:
    """Returns the file of each shard in a folder, which a key of the job names. Raises InputError."""
    held, wanted = set(names(folder)), [f"{stem(shard)}.parquet" for shard in shards]
    if missing := [name for name in wanted if name not in held]:
        raise InputError(
            f"{key}: {folder} lacks {len(missing):,} of {many(len(wanted), 'file')}, one for each shard; the "
            f"first is {missing[0]}"
        )
    return tuple(f"{folder}/{name}" for name in wanted)


def stem(shard: str) -> str:
    """Returns the name of a shard without folder and ending: its features have it, too."""
    name = shard.partition("?")[0].rpartition("/")[2]
    return name.rpartition(".")[0] or name


def kept_files(files: Mapping[str, str], model: About) -> dict[str, About]:
    """Returns what the files that are there say, by shard, if they are those of the shard as it is.

    Raises InputError for a file of another model, of other captions, or of another program: nothing is
    replaced but features of an older version of a shard.
    """
    folders = {file.rpartition("/")[0] for file in files.values()}
    held = {f"{folder}/{name}" for folder in folders for name in names(folder)}
    shards = [shard for shard, file in files.items() if file in held]
    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(zip(shards, pool.map(lambda shard: read_about(files[shard]), shards), strict=True))
        versions = dict(zip(shards, pool.map(version_of, shards), strict=True))
    for shard, about in found.items():
        if about.made_by != model.made_by or about.read_by != model.read_by:
            raise InputError(
                f"{files[shard]} holds features by {about.model}, made otherwise than those asked for: give "
                "another --out, or remove the file"
            )
    return {shard: about for shard, about in found.items() if about.is_of(versions[shard])}


def version_of(shard: str) -> Stamp:
    """Returns size and time of change of a shard. Raises InputError and StorageError."""
    return persistent(shard, lambda: stamp(shard))


def read_about(file: str) -> About:
    """Returns what a file's metadata say. Raises InputError if it is no file of features."""
    from pyarrow import parquet

    def metadata() -> Mapping[bytes, bytes]:
        with opened(file) as content, readable(file):
            return parquet.read_metadata(content).metadata or {}

    try:
        held = persistent(file, metadata)[ABOUT.encode()]
        about = _ABOUT.validate_json(held, strict=True)
        if about.width < 1 or {each.name for each in fields(About)} - parse_json(held).keys():
            raise ValueError("features without values, or of another form")
    except (KeyError, ValueError):
        raise InputError(
            f"{file} is no file of features that this Clipship has written: give another --out, or remove it"
        ) from None
    return about


def values_in(column: Any) -> Vectors:
    """Returns the features in a column of lists, without those that are null. Raises ValueError."""
    from pyarrow import types

    values = column.combine_chunks()
    are_lists = types.is_fixed_size_list(values.type)
    while types.is_fixed_size_list(values.type):
        values = values.flatten()
    vectors: Vectors = values.to_numpy(zero_copy_only=False)
    if not are_lists or vectors.dtype.kind != "f" or not np.isfinite(vectors).all():
        raise ValueError("its features are no finite numbers")
    return vectors


class FeatureWriter:
    """Gathers the rows of one shard, compressed in memory, and writes them as a file."""

    def __init__(self, shard: str, dtype: Dtype) -> None:
        import pyarrow

        self._shard, self._dtype = masked(shard), DTYPES[dtype]
        self._waiting: list[FeatureRows] = []
        self._sink = pyarrow.BufferOutputStream()
        self._writer: Any = None

    def add(self, rows: FeatureRows) -> None:
        """Takes further rows of the shard."""
        self._waiting.append(rows)
        values = sum(part.images.size + part.texts.size for part in self._waiting)
        if values * np.dtype(self._dtype).itemsize >= GROUP_BYTES:
            self._flush()

    def write(self, file: str, about: About) -> None:
        """Writes all rows, whole or not at all. Raises InputError and StorageError."""
        self._flush()
        self._writer.add_key_value_metadata({ABOUT: json.dumps(asdict(about))})
        self._writer.close()
        put(self._sink.getvalue().to_pybytes(), file)

    def _flush(self) -> None:
        from pyarrow import parquet

        if not self._waiting:
            return
        table = _table(self._waiting, self._shard, self._dtype)
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._sink, table.schema, compression="zstd")
        self._writer.write_table(table)
        self._waiting = []


def _table(parts: Sequence[FeatureRows], shard: str, dtype: type) -> Any:
    import pyarrow

    numbers, captions, keys, problems, images, texts, cosines = zip(*parts, strict=True)
    why = list(chain.from_iterable(problems))
    lost = np.array([problem is not None for problem in why], dtype=bool)

    def vectors(values: Sequence[NDArray[np.float32]]) -> Any:
        rows: NDArray[Any] = np.concatenate(values).astype(dtype)
        flat, mask = pyarrow.array(rows.reshape(-1)), pyarrow.array(lost)
        for width in rows.shape[:1:-1]:
            flat = pyarrow.FixedSizeListArray.from_arrays(flat, width)
        return pyarrow.FixedSizeListArray.from_arrays(flat, rows.shape[1], mask=mask)

    same = pyarrow.DictionaryArray.from_arrays(np.zeros(len(why), dtype=np.int32), [shard])
    columns = {
        SHARD: same,
        KEY: pyarrow.array(map(key_text, chain.from_iterable(keys)), type=pyarrow.string()),
        "row": np.concatenate(numbers),
        "caption": np.concatenate(captions),
        "image": vectors(images),
        "text": vectors(texts),
        COSINE: pyarrow.array(np.concatenate(cosines), mask=lost),
        "problem": pyarrow.array(why, type=pyarrow.string()),
    }
    return pyarrow.table(columns)


def key_text(key: str) -> str:
    """Returns a sample's key as the files have it: bytes that are no UTF-8 are replaced."""
    return key.encode(errors="surrogateescape").decode(errors="replace")
