"""From the job file to a source of samples. No torch."""

from collections.abc import Callable, Sequence

from trainer.data.bad import WHOLE, Allowed
from trainer.data.folders import FolderSource
from trainer.data.sample import RawSample, Source
from trainer.data.shards import open_shards
from trainer.data.synthetic import SyntheticSource
from trainer.data.tables import Table, TableSource, by_image, read_table
from trainer.inputs import expand_shards
from trainer.inputs.folders import image_folder
from trainer.job import Data, Eval

__all__ = ["IMAGE_ENDINGS", "RawSample", "Source", "open_images", "open_labelled", "open_source"]

IMAGE_ENDINGS: tuple[str, ...] = Data.model_fields["image_key"].default


def open_source(data: Data, progress: Callable[[int, int], None] | None = None) -> Source:
    """The captioned samples that `[data]` names; `progress(shards done, shards)` is called while shards are indexed."""
    if data.kind == "synthetic":
        return SyntheticSource(data.synthetic_samples)
    if data.kind == "table":
        return TableSource(_tables(data))
    return _shards(data, progress, Allowed.by(data))


def open_images(data: Data, progress: Callable[[int, int], None] | None = None) -> Source:
    """For evaluation: each image once, with all of its captions: rows of a table that name one image become one sample."""
    if data.kind == "webdataset":
        return _shards(data, progress, WHOLE)
    return by_image(_tables(data)) if data.kind == "table" else open_source(data)


def open_labelled(evaluation: Eval, image_key: Sequence[str] = IMAGE_ENDINGS, progress: Callable[[int, int], None] | None = None) -> Source:
    """The labelled samples that `[eval] zero_shot` names; `image_key` is that of `[data]`."""
    if folder := image_folder(evaluation.zero_shot):
        return FolderSource(folder, image_key)
    return open_shards(expand_shards(evaluation.zero_shot), image_key, evaluation.class_key, "label", progress)


def _shards(data: Data, progress: Callable[[int, int], None] | None, allowed: Allowed) -> Source:
    return open_shards(expand_shards(data.train), data.image_key, data.caption_key, "captions", progress, allowed)


def _tables(data: Data) -> list[Table]:
    return [read_table(file, data.image_column, data.caption_column, data.separator) for file in expand_shards(data.train)]
