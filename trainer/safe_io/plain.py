"""Opens files in folders where other users may have put links or FIFOs.

A link is not followed, and a FIFO cannot block the process. Imports no torch.
"""

import errno
import os
import stat
from pathlib import Path


def open_plain(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Opens a regular file that is not a link; returns its descriptor, as an `opener` of `open` does.

    Raises OSError if something else is there: EINVAL for a FIFO, a device or a folder, ELOOP for a link.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_plain(path: Path) -> str:
    """Returns the text of a regular file in UTF-8. Raises OSError as `open_plain` does."""
    with open(path, encoding="utf-8", opener=open_plain) as file:
        return file.read()


def is_own_folder(path: Path) -> bool:
    """Returns whether the path is a folder that belongs to this user; a link to one does not count.

    Raises OSError if nothing is there.
    """
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
