"""Memory in which a rank keeps the blocks that it has read, and from which its loader processes take samples.

It is a file without a name that lies in memory: no folder limits its size, and it ends with the last process
that has it open, however that ends. Nothing in it is ever moved. Memory of blocks that are no longer needed
is used again, since the kernel takes longer to find and clear fresh pages than to fill them; what is more
becomes a hole in the file, which takes none. No torch.
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from threading import Lock
from typing import Any, NamedTuple

from trainer.text.wording import many

SPARE_BYTES, MOST_SPARE = 2**25, 64
"""Memory, and number of its parts, that is kept for later blocks."""
_PUNCH_HOLE = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of Linux."""
_PAGE = mmap.ALLOCATIONGRANULARITY
"""Bytes of a page: 64 kB on some ARM machines, where nothing else can be mapped or given back."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Kept(NamedTuple):
    """Whole pages of an arena."""

    size: int
    """Bytes."""
    place: int


class Arena:
    """Blocks in memory; loader processes that it is sent to share it."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._file = os.memfd_create("clipship-blocks") if descriptor is None else descriptor
        self._end, self._spare, self._changing = 0, list[Kept](), Lock()

    def put(self, content: "bytes | memoryview") -> Kept:
        """Keeps the content; returns where it begins. Threads may call it."""
        kept = self._pages(-(-len(content) // _PAGE) * _PAGE)
        rest, at = memoryview(content), kept.place
        while rest:
            written = os.pwrite(self._file, rest, at)
            rest, at = rest[written:], at + written
        return kept

    def read(self, place: int, size: int) -> bytes:
        """Returns `size` bytes at a place within what was kept."""
        parts: list[bytes] = []
        while size > 0:  # one call reads 2 GiB at most
            parts.append(os.pread(self._file, size, place))
            if not parts[-1]:
                raise EOFError(f"a block lacks its last {many(size, 'byte')}")
            size, place = size - len(parts[-1]), place + len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def mapped(self, place: int, size: int) -> mmap.mmap:
        """Returns what was kept from a page on, without a copy: pages that are given back take no memory."""
        return mmap.mmap(self._file, size, prot=mmap.PROT_READ, offset=place)

    def free(self, kept: Kept) -> None:
        """Gives back what was kept, when nobody reads it any more."""
        with self._changing:
            if len(self._spare) < MOST_SPARE and sum(spare.size for spare in self._spare) < SPARE_BYTES:
                self._spare.append(kept)
                return
        if kept.size and _libc.fallocate(self._file, _PUNCH_HOLE, kept.place, kept.size):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    @property
    def held_bytes(self) -> int:
        """Memory that the blocks take now."""
        return os.fstat(self._file).st_blocks * 512

    def _pages(self, size: int) -> Kept:
        """Returns pages of at least that size: spare ones that are not much larger, or new ones."""
        with self._changing:
            fitting = [spare for spare in self._spare if size <= spare.size <= 2 * size]
            if fitting:
                self._spare.remove(found := min(fitting))
                return found
            self._end += size
            return Kept(size, self._end - size)

    def __reduce__(self) -> tuple[Callable[..., "Arena"], tuple[Any, ...]]:
        return _attached, (DupFd(self._file),)

    def __del__(self) -> None:
        os.close(self._file)


def _attached(sent: Any) -> Arena:
    return Arena(sent.detach())
