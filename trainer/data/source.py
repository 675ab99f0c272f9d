"""Opens the sources of samples that the job file names. No torch."""

from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.config import Data, Eval
from trainer.config.formats import FORMATS
from trainer.data.bad_samples import WHOLE, Allowed
from trainer.data.block_cache import BlockCache
from trainer.data.captions import CaptionReader
from trainer.data.folders import FolderSource
from trainer.data.image_folder import image_folder
from trainer.data.index import Selects
from trainer.data.indexed import FileIndex, index_in_memory
from trainer.data.sample import MOST_BYTES, RawSample, Source
from trainer.data.shard_names import expand_shards
from trainer.data.shards import open_indexed, open_shards, shard_selection
from trainer.data.synthetic import SyntheticSource
from trainer.data.tables import Table, TableColumns, TableSource, by_image, left_out_of, read_table
from trainer.sysinfo.imports import load

__all__ = ["IMAGE_ENDINGS", "RawSample", "Source", "open_images", "open_labelled", "open_source"]

Progress = Callable[[int, int], None]
IMAGE_ENDINGS: tuple[str, ...] = Data.model_fields["image_key"].default


def open_source(data: Data, progress: Progress | None = None, allowed: Allowed | None = None) -> Source:
    """Returns the captioned samples that `[data]` names; as much may be wrong with them as the job allows.

    `progress` is called with (shards done, shards) while shards are indexed.
    """
    selection, allowed = selection_of(data), allowed or Allowed.by(data)
    if selection is None:
        source: Source = load(str(FORMATS[data.kind].source))(data, allowed)
        return source
    index = index_in_memory(expand_shards(data.train), selection, progress)
    return open_with_index(index, data, allowed)


def selection_of(data: Data) -> Selects | None:
    """Returns what an index has of the files that `[data]` names; None for a format without an index."""
    name = FORMATS[data.kind].selection
    return load(name)(data) if name is not None else None


def open_with_index(index: FileIndex, data: Data, allowed: Allowed) -> Source:
    """Returns the samples of files that are indexed."""
    source: Source = load(str(FORMATS[data.kind].indexed))(index, data, allowed)
    return source


def open_images(data: Data, progress: Progress | None = None) -> Source:
    """Returns the source for evaluation, with each image once and all of its captions.

    Rows of a table that name one image become one sample.
    """
    source: Source = load(FORMATS[data.kind].images)(data, progress)
    return source


def open_labelled(
    evaluation: Eval,
    image_key: Sequence[str] = IMAGE_ENDINGS,
    progress: Progress | None = None,
    most_bytes: int = MOST_BYTES,
    allowed: Allowed = WHOLE,
) -> Source:
    """Returns the labelled samples that `[eval] zero_shot` names.

    `image_key` and `most_bytes` are those of `[data]`, and `allowed` says what may be wrong with shards.
    """
    if folder := image_folder(evaluation.zero_shot):
        return FolderSource(folder, image_key, most_bytes)
    names = expand_shards(evaluation.zero_shot)
    return open_shards(names, image_key, evaluation.class_key, "label", progress, allowed, most_bytes)


def synthetic(data: Data, *_: object) -> Source:
    """Returns made-up samples: a format of FORMATS."""
    return SyntheticSource(data.synthetic_samples)


def indexed_shards(index: FileIndex, data: Data, allowed: Allowed) -> Source:
    """Returns the samples of shards: a format of FORMATS."""
    selection, captions = shard_selection(data), CaptionReader.by(data)
    source = open_indexed(index, selection, "captions", allowed, data.max_member_bytes, captions)
    if data.cache is not None:
        source.cache = BlockCache(Path(data.cache), data.cache_gb * 10**9)
    return source


def all_shards(data: Data, progress: Progress | None = None) -> Source:
    """Returns the samples of shards for evaluation."""
    return open_source(data, progress)


def tables(data: Data, allowed: Allowed) -> Source:
    """Returns the rows of tables: a format of FORMATS."""
    return TableSource(_read_tables(data, allowed), data.max_member_bytes)


def tables_by_image(data: Data, *_: object) -> Source:
    """Returns the images of tables, each once."""
    return by_image(_read_tables(data, Allowed.by(data)), data.max_member_bytes)


def _read_tables(data: Data, allowed: Allowed) -> list[Table]:
    read = [read_table(file, TableColumns.by(data)) for file in expand_shards(data.train)]
    allowed.check(left_out_of(read), sum(len(table.rows) for table in read))
    return read
