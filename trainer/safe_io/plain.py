"""Opens files in folders where other users may have put links, FIFOs, or files without end.

A link is not followed, a FIFO cannot block the process, and no file is read beyond a limit. Every file of a
run folder is opened here. Imports no torch.
"""

import errno
import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TypeVar

Record = TypeVar("Record")

MOST_BYTES = 64 * 2**20
"""Limit of a file that is read whole: ten times what the largest job writes into one."""
_BLOCK = 2**16
MOST_LINES_BYTES = 2**30
"""Limit of a file to which every step of a run may add a line, where it is read whole."""


def open_plain(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Opens a regular file that is not a link; returns its descriptor, as an `opener` of `open` does.

    Raises OSError if something else is there: EINVAL for a FIFO or a device, EISDIR for a folder, ELOOP for a
    link.
    """
    try:
        return open_regular(path, flags | os.O_NOFOLLOW, mode)
    except OSError as problem:
        if problem.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a link, which is not followed here", str(path)) from None


def open_regular(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Opens a regular file, or one that a link leads to, as `open_plain` does: for files that users name."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        number, what = (errno.EISDIR, "a folder") if stat.S_ISDIR(kind) else (errno.EINVAL, "no plain file")
        raise OSError(number, f"it is {what}", str(path))
    return descriptor


def read_plain(path: Path, *, most: int = MOST_BYTES, errors: str = "strict", links: bool = False) -> str:
    """Returns the text of a regular file in UTF-8; with `links`, also of one that a link leads to.

    `errors` is that of `bytes.decode`. Raises OSError as `open_plain` does, and with EFBIG for a file of more
    than `most` bytes; ValueError for bytes that are no UTF-8.
    """
    with open(path, "rb", opener=open_regular if links else open_plain) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""
    if max(size, len(content)) > most:
        raise OSError(errno.EFBIG, f"its size in bytes is {size:,}, above the limit of {most:,}", str(path))
    return content.decode(errors=errors)


def read_lines(path: Path, *, most: int = MOST_BYTES) -> Iterator[bytes]:
    """Yields the lines of a regular file of any size, each with its end, and holds one of them at a time.

    A line of more than `most` bytes comes in parts. Raises OSError as `open_plain` does.
    """
    with open(path, "rb", opener=open_plain) as file:
        while line := file.readline(most):
            yield line


def lines_from_end(path: Path, *, most: int = MOST_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yields where each line begins and the line with its end, the last one first.

    It reads as far as it is asked. A line of more than `most` bytes comes in parts. Raises OSError as
    `open_plain` does.
    """
    with open(path, "rb", opener=open_plain) as file:
        end, size = file.seek(0, os.SEEK_END), _BLOCK
        while end:
            begin = file.seek(max(0, end - size))
            lines = io.BytesIO(file.read(end - begin)).readlines()
            if begin and len(lines) == 1 and size < most:
                size *= 2  # the line may have begun earlier
                continue
            for line in reversed(lines[1:] if begin and len(lines) > 1 else lines):
                end -= len(line)
                yield end, line
            size = _BLOCK


def still_there(file: TextIOWrapper) -> TextIOWrapper:
    """Returns a file that is open for appending; opened anew if somebody has removed it meanwhile.

    No folder is made. Raises OSError as `open_plain` does, and the file stays open.
    """
    if os.fstat(file.fileno()).st_nlink:
        return file
    anew = open(file.name, "a", errors=file.errors, opener=open_plain)  # noqa: SIM115
    file.close()
    return anew


def append_line(path: Path, line: str) -> None:
    """Adds one line to a file, after closing one that a kill or a full disk left unfinished.

    Raises OSError as `open_plain` does.
    """
    with open(path, "a+b", opener=open_plain) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        before = b"\n" if file.read(1) not in (b"", b"\n") else b""
        file.write(before + line.encode() + b"\n")


def read_json(path: Path, *, links: bool = False) -> Any:
    """Returns the content of a JSON file, read by `read_plain`. Raises OSError or ValueError."""
    return parse_json(read_plain(path, links=links))


def read_as(kind: Callable[..., Record], path: Path) -> Record | None:
    """Returns the record that a JSON file holds; None if it cannot be read or lacks a field."""
    try:
        return kind(**read_json(path))
    except (OSError, ValueError, TypeError):
        return None


def parse_json(text: str | bytes) -> Any:
    """Returns the value of JSON text; a whole number beyond all floats is infinite. Raises ValueError."""
    try:
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 300 else float(digits))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def read_part(path: Path, begin: int, most: int) -> bytes:
    """Returns at most `most` bytes of a regular file from byte `begin` on; below 0 it counts from the end.

    Raises OSError as `open_plain` does.
    """
    with open(path, "rb", opener=open_plain) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(begin if begin >= 0 else max(0, size + begin))
        return file.read(most)


def last_text(path: Path, most: int) -> str:
    """Returns the last `most` bytes of a regular file as text. Raises OSError as `open_plain` does."""
    return read_part(path, -most, most).decode(errors="replace")


def is_plain(path: Path) -> bool:
    """Returns whether a regular file that is not a link is there."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def is_own_folder(path: Path) -> bool:
    """Returns whether the path is a folder that belongs to this user; a link to one does not count.

    Raises OSError if nothing is there.
    """
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
