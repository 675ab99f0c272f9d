"""Folders that are whole or not there, and folders that processes hold. Imports no torch.

The former are filled beside their place, then renamed; `try_folder` tries what a file system offers of that.
The latter lie where others can write, and are private to this user. Whoever uses one holds a shared lock on a
file in it; an abandoned one is removed by a process that starts later. Process ids do not show who lives,
since containers share /dev/shm.
"""

import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import IO

from trainer.errors import InputError
from trainer.safe_io.atomic import NO_LINKS, offers, write_whole
from trainer.safe_io.plain import append_line, is_own_folder, open_plain

_UNLOCKED_S = 60.0
"""Seconds for which a folder without a lock is not abandoned: whoever made it has not locked it yet."""
_TRIES = 3000
_WAIT_S = 0.01


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


def make_private(folder: Path) -> Path:
    """Makes a folder that others cannot enter, where it is missing, and returns it.

    Raises OSError if that fails, or if another user has made it or can enter it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_own_folder(folder) or stat.S_IMODE(folder.lstat().st_mode) & 0o077:
        raise PermissionError(errno.EPERM, "it is another user's, or others can enter it", str(folder))
    return folder


def hold(folder: Path, lock: str) -> IO[str]:
    """Makes a private folder if it is missing, and holds it as long as the returned file `lock` is open.

    Raises OSError as `make_private` does. Another process may be removing the folder meanwhile, so it tries
    again until what it holds is what stands there.
    """
    for _ in range(_TRIES):
        with suppress(BlockingIOError, FileExistsError, FileNotFoundError), ExitStack() as opened:
            held = opened.enter_context(open(make_private(folder) / lock, "a+", opener=open_plain))
            # The kernel frees it however the process ends; NFS shares the lock of a readable file alone.
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(held.fileno()), (folder / lock).lstat()):
                opened.pop_all()
                return held
        time.sleep(_WAIT_S)
    raise TimeoutError(errno.ETIMEDOUT, "other processes remove it again and again", str(folder))


def remove_tree(folder: Path) -> None:
    """Removes a folder with all that is in it, as far as that can be removed."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(
    folders: Iterable[Path], lock: str, remove: Callable[[Path], None] = remove_tree
) -> None:
    """Removes those of the folders that are this user's and that nobody holds any more."""
    for folder in folders:
        with suppress(OSError):  # it is another user's, or another process removed it
            if is_own_folder(folder):
                remove_free(folder, lock, remove)


def remove_free(folder: Path, lock: str, remove: Callable[[Path], None] = remove_tree) -> None:
    """Removes the folder unless a process holds it, or may be about to. Raises OSError."""
    if not (folder / lock).exists():
        if time.time() - folder.lstat().st_mtime > _UNLOCKED_S:
            remove(folder)
        return
    with open(folder / lock, opener=open_plain) as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The lock of a folder that was removed meanwhile is free, but another process may hold the new one.
        if os.path.samestat(os.fstat(file.fileno()), (folder / lock).lstat()):
            remove(folder)
