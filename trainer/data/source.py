"""Opens the sources of samples that the job file names. No torch."""

from collections.abc import Callable, Sequence

from trainer.config import Data, Eval
from trainer.config.caption_key import parse_caption_key
from trainer.data.bad_samples import WHOLE, Allowed
from trainer.data.captions import CaptionReader
from trainer.data.folders import FolderSource
from trainer.data.image_folder import image_folder
from trainer.data.sample import MOST_BYTES, RawSample, Source
from trainer.data.shard_names import expand_shards
from trainer.data.shards import open_shards
from trainer.data.synthetic import SyntheticSource
from trainer.data.tables import Table, TableSource, by_image, read_table

__all__ = ["IMAGE_ENDINGS", "RawSample", "Source", "open_images", "open_labelled", "open_source"]

IMAGE_ENDINGS: tuple[str, ...] = Data.model_fields["image_key"].default


def open_source(data: Data, progress: Callable[[int, int], None] | None = None) -> Source:
    """Returns the captioned samples that `[data]` names.

    `progress` is called with (shards done, shards) while shards are indexed.
    """
    if data.kind == "synthetic":
        return SyntheticSource(data.synthetic_samples)
    if data.kind == "table":
        return TableSource(_tables(data), data.max_member_bytes)
    return _shards(data, progress, Allowed.by(data))


def open_images(data: Data, progress: Callable[[int, int], None] | None = None) -> Source:
    """Returns the source for evaluation, with each image once and all of its captions.

    Rows of a table that name one image become one sample.
    """
    if data.kind == "webdataset":
        return _shards(data, progress, WHOLE)
    return by_image(_tables(data), data.max_member_bytes) if data.kind == "table" else open_source(data)


def open_labelled(
    evaluation: Eval,
    image_key: Sequence[str] = IMAGE_ENDINGS,
    progress: Callable[[int, int], None] | None = None,
    most_bytes: int = MOST_BYTES,
) -> Source:
    """Returns the labelled samples that `[eval] zero_shot` names.

    `image_key` and `most_bytes` are those of `[data]`.
    """
    if folder := image_folder(evaluation.zero_shot):
        return FolderSource(folder, image_key, most_bytes)
    shards = expand_shards(evaluation.zero_shot)
    return open_shards(shards, image_key, evaluation.class_key, "label", progress, most_bytes=most_bytes)


def _shards(data: Data, progress: Callable[[int, int], None] | None, allowed: Allowed) -> Source:
    shards = expand_shards(data.train)
    return open_shards(
        shards,
        data.image_key,
        parse_caption_key(data.caption_key).ending,
        "captions",
        progress,
        allowed,
        data.max_member_bytes,
        CaptionReader.by(data),
    )


def _tables(data: Data) -> list[Table]:
    return [
        read_table(file, data.image_column, data.caption_column, data.separator, encoding=data.encoding)
        for file in expand_shards(data.train)
    ]
