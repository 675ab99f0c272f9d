"""A set of labelled images with a folder per class: finds the folder and names the classes.

Imports no torch.
"""

import os
from collections.abc import Sequence

from trainer.data.shard_names import expand_names
from trainer.errors import InputError


def image_folder(patterns: Sequence[str]) -> str | None:
    """Returns the folder of class folders that the patterns name.

    Returns None if they name anything else, such as two folders.
    """
    try:
        names = [name for pattern in patterns for name in expand_names(pattern)]
    except InputError:  # braces that cannot be expanded; the search for shards reports them
        return None
    return names[0] if len(names) == 1 and os.path.isdir(names[0]) and class_folders(names[0]) else None


def class_folders(root: str) -> list[str]:
    """Returns the names of the folders in `root` that are not hidden, in the order that numbers the classes.

    It is the order of torchvision's ImageFolder.
    """
    return sorted(
        entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")
    )


def spoken(folder: str) -> str:
    """Returns a class name as used in a sentence: "golden_retriever" becomes "golden retriever"."""
    return folder.replace("_", " ")
