"""Opens the sources of samples that the job file names. No torch."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence

from trainer.config import Data, Eval
from trainer.data.bad_samples import WHOLE, Allowed
from trainer.data.entry import Selects
from trainer.data.files import read_file
from trainer.data.formats import READERS, Progress
from trainer.data.image_folder import class_folders, image_folder
from trainer.data.index import Index
from trainer.data.sample import MOST_BYTES, LeftOut, RawSample, Source, check_file
from trainer.data.shard_names import expand_shards
from trainer.data.shards import open_shards
from trainer.errors import InputError

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


class FolderSource:
    """Source of the images below the class folders of `root`, at any depth.

    They are ordered by class and then by path.
    """

    def __init__(self, root: str, image_endings: Sequence[str], most_bytes: int = MOST_BYTES) -> None:
        self._root, self._most_bytes = root, most_bytes
        self._paths: list[str] = []
        self._labels: list[int] = []
        left_out: Counter[str] = Counter()
        endings = tuple(f".{ending.lower()}" for ending in image_endings)
        for label, folder in enumerate(class_folders(root)):
            for path in _files(os.path.join(root, folder)):
                if path.lower().endswith(endings):
                    self._paths.append(path)
                    self._labels.append(label)
                else:
                    left_out[f"no {' or '.join(endings)}"] += 1
        if outside := sum(
            entry.is_file() and entry.name.lower().endswith(endings) for entry in os.scandir(root)
        ):
            left_out["in no class folder"] = outside
        self.left_out = LeftOut(left_out)
        if not self._paths:
            raise InputError(
                f"{root}: no image in its {len(class_folders(root))} folders; an image's name ends in "
                f"{' or '.join(endings)}"
            )

    def __len__(self) -> int:
        return len(self._paths)

    def shard_sizes(self) -> list[int]:
        return [len(self._paths)]

    def read(self, index: int) -> RawSample:
        path = self._paths[index]
        key = os.path.relpath(path, self._root)
        content = read_file(path, path, lambda status: check_file(self._root, key, status, self._most_bytes))
        return RawSample(key, self._root, content, (), self._labels[index])


def _files(folder: str) -> Iterator[str]:
    """Yields every file below the folder that is not hidden, ordered by path."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _files(entry.path)
        else:
            yield entry.path
