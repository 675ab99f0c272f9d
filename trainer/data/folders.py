"""Labelled images in folders: one folder per class, numbered in the order of the folders' names. No torch."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence

from trainer.data.files import read_file
from trainer.data.image_folder import class_folders
from trainer.data.sample import MOST_BYTES, LeftOut, RawSample, check_file
from trainer.errors import InputError


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
