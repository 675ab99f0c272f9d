"""A set of labelled images in a folder for each class: what its patterns name, and what its classes are called. Imports no torch."""

import os
from collections.abc import Sequence

from trainer.errors import InputError
from trainer.inputs.shards import expand_names


def image_folder(patterns: Sequence[str]) -> str | None:
    """The folder of class folders that the patterns name; None where they name anything else, more than one folder for example."""
    try:
        found = [name for pattern in patterns for name in expand_names(pattern)]
    except InputError:  # braces that cannot be expanded; told where the patterns are looked for as shards
        return None
    return found[0] if len(found) == 1 and os.path.isdir(found[0]) and class_folders(found[0]) else None


def class_folders(root: str) -> list[str]:
    """The names of the folders in `root` that are not hidden, in the order that numbers the classes: that of torchvision's ImageFolder."""
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))


def spoken(folder: str) -> str:
    """A class as a sentence names it: "golden_retriever" is a golden retriever."""
    return folder.replace("_", " ")
