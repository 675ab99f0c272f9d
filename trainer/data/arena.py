"""Memory in which a rank keeps the blocks that it has read, and from which its loader processes take samples.

It is a file without a name that lies in memory: no folder limits its size, and it ends with the last process
that has it open, however that ends. Each block gets places that none had before, and a block that is no
longer needed becomes a hole, so nothing is ever moved and no place means two things. No torch.
"""

import ctypes
import os
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from threading import Lock
from typing import Any

_PUNCH_HOLE = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of Linux."""
_PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Arena:
    """Blocks in memory; loader processes that it is sent to share it."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._file = os.memfd_create("clipship-blocks") if descriptor is None else descriptor
        self._end, self._growing = 0, Lock()

    def put(self, content: bytes) -> int:
        """Keeps the content; returns its place. Threads may call it."""
        with self._growing:
            place = self._end
            self._end += _pages(len(content))
        rest, at = memoryview(content), place
        while rest:
            written = os.pwrite(self._file, rest, at)
            rest, at = rest[written:], at + written
        return place

    def read(self, place: int, size: int) -> bytes:
        """Returns `size` bytes at a place within what was kept."""
        content = os.pread(self._file, size, place)
        while len(content) < size and (
            more := os.pread(self._file, size - len(content), place + len(content))
        ):
            content += more
        return content

    def free(self, place: int, size: int) -> None:
        """Gives back the memory of what was kept."""
        # A part of a page would be set to zero, and stay.
        if size and _libc.fallocate(self._file, _PUNCH_HOLE, place, _pages(size)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    @property
    def held_bytes(self) -> int:
        """Memory that the blocks take now."""
        return os.fstat(self._file).st_blocks * 512

    def __reduce__(self) -> tuple[Callable[..., "Arena"], tuple[Any, ...]]:
        return _attached, (DupFd(self._file),)

    def __del__(self) -> None:
        os.close(self._file)


def _pages(size: int) -> int:
    """Returns the bytes of the whole pages that so many bytes take."""
    return -(-size // _PAGE) * _PAGE


def _attached(sent: Any) -> Arena:
    return Arena(sent.detach())
