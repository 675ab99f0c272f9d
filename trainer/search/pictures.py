"""Lists the picture files below a folder. Imports no torch, and opens no picture."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import InputError
from trainer.text.terminal import one_line
from trainer.text.wording import many

ENDINGS = (
    *(".jpg", ".jpeg", ".jpe", ".png", ".webp", ".avif", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".jp2"),
)
"""Endings of the names of picture files, in the formats that `trainer.data.pictures` decodes."""


@dataclass(frozen=True)
class Picture:
    """A picture file as it was when the folder was listed; a changed file is another picture."""

    name: str
    """Path below the folder."""
    size: int
    """Bytes of the file."""
    changed_ns: int
    """Time of the last change, in nanoseconds since 1970."""


def find_pictures(folder: Path, left_out: Callable[[str], object]) -> list[Picture]:
    """Returns the picture files below the folder, by path.

    Hidden files and folders are left out. So are links, because what they name may lie elsewhere. `left_out`
    gets a sentence for what cannot be read. Raises InputError if there is no folder, or no picture in it.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "there is no such folder"
        raise InputError(f"--images {folder}: {what}: give the folder that holds the pictures")
    links: list[str] = []
    pictures = sorted(_walk(folder, "", links, left_out), key=lambda picture: picture.name)
    if links and pictures:
        left_out(f"{many(len(links), 'link')}, {links[0]} among them: links are not followed")
    if not pictures:
        hint = f", and its {many(len(links), 'link')} are not followed" if links else ""
        raise InputError(
            f"--images {folder}: no picture is in this folder or below it{hint}; the names of pictures end "
            f"in {', '.join(ENDINGS)}"
        )
    return pictures


def _walk(root: Path, inside: str, links: list[str], left_out: Callable[[str], object]) -> Iterator[Picture]:
    try:
        entries = list(os.scandir(root / inside))
    except OSError as problem:
        left_out(f"{one_line(str(root / inside))}: cannot be read: {problem.strerror}")
        return
    for entry in entries:
        name = os.path.join(inside, entry.name)
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(root, name, links, left_out)
        elif entry.is_symlink():
            if entry.name.lower().endswith(ENDINGS) or entry.is_dir():
                links.append(one_line(name))
        elif entry.name.lower().endswith(ENDINGS):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError as problem:  # removed meanwhile
                left_out(f"{one_line(str(root / name))}: cannot be read: {problem.strerror}")
                continue
            yield Picture(name, status.st_size, status.st_mtime_ns)
