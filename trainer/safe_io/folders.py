"""Folders that are whole or not there: filled beside their place, then renamed. Imports no torch.

`try_folder` tries what a file system offers of that.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from trainer.errors import InputError
from trainer.safe_io.atomic import NO_LINKS, offers, write_whole
from trainer.safe_io.plain import append_line, open_plain


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yields a folder to fill; it is renamed to `out` if the block succeeds and removed if it fails."""
    beside = out.parent / f".{out.name}.partial-{token_hex(4)}"
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise InputError(
            f"{out}: cannot be written: {error.strerror} ({error.filename}); choose another folder"
        ) from error
    try:
        yield beside
        beside.rename(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def move_folder(source: Path, target: Path, *, first: str = "", last: str = "") -> Path:
    """Renames a folder of files, and returns its new path.

    Where folders cannot be renamed, its files are moved one by one: the one named `first` before all others,
    the one named `last` after them.
    """
    if not offers(lambda: os.rename(source, target)):
        target.mkdir()
        for name in sorted(os.listdir(source), key=lambda name: (name == last) - (name == first)):
            os.replace(source / name, target / name)
        source.rmdir()
    return target


def flush_folder(folder: Path) -> bool:
    """Flushes a folder, without which a rename in it may not survive a power cut.

    Returns False if its file system flushes none.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        return offers(lambda: os.fsync(handle))
    finally:
        os.close(handle)


def try_folder(folder: Path) -> list[str]:
    """Tries in a folder what a run needs of its file system, and leaves nothing behind.

    Returns what it does not offer, with what follows from that. Raises OSError that says what a run cannot do
    without.
    """
    trial = folder / f".clipship-trial-{token_hex(8)}"
    file, part = trial / "file", trial / "part"
    steps: tuple[tuple[str, Callable[[], object]], ...] = (
        ("make a folder", lambda: part.mkdir(parents=True)),
        ("write a file and rename it", lambda: write_whole(file, "one")),
        ("open a file again and add to it", lambda: append_line(file, "two")),
        ("link files (claims begin empty)", lambda: offers(lambda: os.link(file, trial / "b"), NO_LINKS)),
        ("lock files (nothing keeps a second start out)", lambda: offers(lambda: _lock(file))),
        ("move a file to another folder", lambda: os.replace(file, part / "file")),
        ("rename folders (their files are moved)", lambda: offers(lambda: os.rename(part, trial / "c"))),
        ("flush folders (a power cut may cost a checkpoint)", lambda: flush_folder(trial)),
        ("remove a folder", lambda: shutil.rmtree(trial)),
    )
    missing = []
    try:
        for what, attempt in steps:
            if attempt() is False:
                missing.append(what)
    except OSError as error:
        raise OSError(f"a run cannot {what} in {folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(trial, ignore_errors=True)
    return missing


def _lock(path: Path) -> None:
    with open(path, "a", opener=open_plain) as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
