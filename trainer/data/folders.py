"""Labelled images in folders: one folder for each class, numbered in the order of the folders' names. No torch."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.data.files import persistent
from trainer.data.sample import LeftOut, RawSample
from trainer.errors import InputError
from trainer.inputs.folders import class_folders


class FolderSource:
    """The images below the class folders of `root`, at any depth: class by class, in the order of their paths."""

    def __init__(self, root: str, image_endings: Sequence[str]) -> None:
        self._root = root
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
        self.left_out = LeftOut(left_out)
        if not self._paths:
            raise InputError(f"{root}: no image in its {len(class_folders(root))} folders; an image's name ends in {' or '.join(endings)}")

    def __len__(self) -> int:
        return len(self._paths)

    def shard_sizes(self) -> list[int]:
        return [len(self._paths)]

    def read(self, index: int) -> RawSample:
        path = self._paths[index]
        content = persistent(path, Path(path).read_bytes, was_there=True)
        return RawSample(os.path.relpath(path, self._root), self._root, content, (), self._labels[index])


def _files(folder: str) -> Iterator[str]:
    """Every file below that is not hidden, in the order of the paths, wherever they lie."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _files(entry.path)
        else:
            yield entry.path
