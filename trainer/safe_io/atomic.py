"""Atomic files: written beside their place, flushed to the disk, then renamed or linked.

A reader sees the whole file or none. Imports no other module of this package and no torch.
"""

import errno
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

_KEPT_OF_NAME = 50
"""Characters of the file's name that the temporary name keeps. One takes up to 4 bytes, and a name has at
most 255 bytes."""
NOT_OFFERED = (errno.EINVAL, errno.EMFILE, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV)
"""Answers of file systems to what they do not offer: gcsfuse renames no folder that holds a file (EMFILE), an
overlay none of its lower layer (EXDEV), an old CIFS flushes no folder (EINVAL)."""
NO_LINKS = (errno.EPERM, *NOT_OFFERED)
"""Answers of those without hard links: FAT, some of FUSE, some network file systems."""
_VOID_S = 10.0
"""Seconds after which an empty file of `make_once` is void."""


def write_whole(path: Path, text: str, *, private: bool = False) -> None:
    """Write the text in UTF-8, replacing an older file.

    After a kill or on a full disk the older file remains. With `private`, only the owner may read the file
    (mode 0600), as files with a job's values need. Raises OSError.
    """
    with replacing(path, mode=0o600 if private else 0o666) as file:
        file.write(text.encode())


def make_once(path: Path, text: str, *, private: bool = False) -> bool:
    """Makes a file with the text in UTF-8; returns False if it is there already: the first to make it wins.

    It appears whole; only on a file system without links may others see it empty for a moment, see `is_void`.
    With `private`, only the owner may read it. Raises OSError.
    """
    beside = _beside(path)
    write_whole(beside, text, private=private)
    try:
        return _link(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _link(beside: Path, path: Path) -> bool:
    try:
        if offers(lambda: os.link(beside, path), NO_LINKS):
            return True
        path.touch(exist_ok=False)
    except FileExistsError:
        return beside.samefile(path)  # NFS repeats a request whose answer was lost
    os.replace(beside, path)
    return True


def is_void(path: Path) -> bool:
    """Returns whether a file of `make_once` is empty for good: whoever made it has died before it was filled.

    Call it after `make_once`, which has just written to the folder. Raises OSError.
    """
    there = path.stat()
    # both times are the file system's own: clocks of nodes may differ
    return there.st_size == 0 and path.parent.stat().st_mtime - there.st_mtime > _VOID_S


def offers(attempt: Callable[[], object], without: Collection[int] = NOT_OFFERED) -> bool:
    """Returns whether a file system does what is attempted; False for an error of `without`."""
    try:
        attempt()
    except OSError as error:
        if error.errno not in without:
            raise
        return False
    return True


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yields a new file to fill; when the block succeeds, the file takes the place of `path`.

    After a failure the older file is still there. The temporary name is random and always new, so a link that
    others made beforehand leads nowhere.
    """
    beside = _beside(path)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut may leave an empty file under the new name
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name[:_KEPT_OF_NAME]}.{os.urandom(8).hex()}.partial")


def write_json(path: Path, value: Any) -> None:
    """Write the value as indented JSON, as `json_text` and `write_whole` do."""
    write_whole(path, json_text(value, indent=2) + "\n")


def json_text(value: Any, indent: int | None = None, *, ascii_only: bool = True) -> str:
    """Returns JSON text. JSON has no NaN and no infinities: they become null."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=ascii_only, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
