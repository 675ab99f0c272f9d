"""Opens the sources of samples that the job file names. No torch."""

from collections.abc import Sequence

from trainer.config import Data, Eval
from trainer.data.bad_samples import WHOLE, Allowed
from trainer.data.entry import Selects
from trainer.data.folders import FolderSource
from trainer.data.formats import READERS, Progress
from trainer.data.image_folder import image_folder
from trainer.data.index import Index
from trainer.data.sample import MOST_BYTES, RawSample, Source
from trainer.data.shard_names import expand_shards
from trainer.data.shards import open_shards

__all__ = ["IMAGE_ENDINGS", "RawSample", "Source", "open_images", "open_labelled", "open_source"]

IMAGE_ENDINGS: tuple[str, ...] = Data.model_fields["image_key"].default


def open_source(data: Data, progress: Progress | None = None, allowed: Allowed | None = None) -> Source:
    """Returns the captioned samples that `[data]` names; as much may be wrong with them as the job allows.

    `progress` is called with (shards done, shards) while shards are indexed.
    """
    return READERS[data.kind].source(data, allowed or Allowed.by(data), progress)


def selection_of(data: Data) -> Selects | None:
    """Returns what an index has of the files that `[data]` names; None for a format without an index."""
    return READERS[data.kind].selection(data)


def open_with_index(index: Index, data: Data, allowed: Allowed) -> Source:
    """Returns the samples of files that are indexed."""
    return READERS[data.kind].indexed(index, data, allowed)


def open_images(data: Data, progress: Progress | None = None) -> Source:
    """Returns the source for evaluation, with each image once and all of its captions.

    Rows of a table that name one image become one sample.
    """
    return READERS[data.kind].images(data, progress)


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
