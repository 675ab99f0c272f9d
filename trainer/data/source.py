"""From the job file to a source of samples. No torch."""

from collections.abc import Callable, Sequence

from trainer.data.sample import RawSample, Source
from trainer.data.shards import open_shards
from trainer.data.synthetic import SyntheticSource
from trainer.data.tables import TableSource, read_table
from trainer.inputs import expand_shards
from trainer.job import Data, Eval

__all__ = ["IMAGE_ENDINGS", "RawSample", "Source", "open_labelled", "open_source"]

IMAGE_ENDINGS: tuple[str, ...] = Data.model_fields["image_key"].default


def open_source(data: Data, progress: Callable[[int, int], None] | None = None) -> Source:
    """The captioned samples that `[data]` names; `progress(shards done, shards)` is called while shards are indexed."""
    if data.kind == "synthetic":
        return SyntheticSource(data.synthetic_samples)
    files = expand_shards(data.train)
    if data.kind == "table":
        return TableSource([read_table(file, data.image_column, data.caption_column, data.separator) for file in files])
    return open_shards(files, data.image_key, data.caption_key, "captions", progress)


def open_labelled(evaluation: Eval, image_key: Sequence[str] = IMAGE_ENDINGS, progress: Callable[[int, int], None] | None = None) -> Source:
    """The labelled samples that `[eval] zero_shot` names; `image_key` is that of `[data]`."""
    return open_shards(expand_shards(evaluation.zero_shot), image_key, evaluation.class_key, "label", progress)
