"""Reads a far file here and there: in large parts what lies close together, by hops what does not. No torch.

So a tar's headers are read: of samples of some kilobytes each byte, in few requests, and of members that are
larger than HOP the headers alone.
"""

import io
from collections.abc import Callable

HOP = 2**20
"""Bytes that are rather passed over than read: they take about as long as a request that they spare, where
16 connections share some hundred MB a second."""
FIRST_BYTES = 2**20
"""Bytes of the first request: many a file is smaller."""
LEAST_BYTES, MOST_BYTES = 2**16, 2**22
"""Bytes of a request after a hop, and after many without one; each has twice those of the one before."""


class Hopping(io.RawIOBase):
    """A file of `size` bytes of which `fetch(begin, size)` returns parts.

    Without `ahead` it fetches what is asked for, and no more.
    """

    def __init__(self, size: int, fetch: Callable[[int, int], bytes], ahead: bool = True) -> None:
        self._size, self._fetch, self._ahead = size, fetch, ahead
        self._at = self._begin = 0
        self._content = b""
        """Bytes that were fetched last, from `_begin` on."""
        self._next_bytes = FIRST_BYTES

    def read(self, size: int | None = -1) -> bytes:
        """Returns `size` bytes, or what is left. Raises what `fetch` raises."""
        most = self._size if size is None or size < 0 else self._at + size
        begin, end = self._at, min(most, self._size)
        if begin >= end:
            return b""
        if not self._begin <= begin <= end <= self._begin + len(self._content):
            self._fetch_from(begin, end)
        self._at = end
        return self._content[begin - self._begin : end - self._begin]

    def _fetch_from(self, begin: int, end: int) -> None:
        """Fetches what is asked for, and what may be asked for next."""
        if self._content:
            passed_over = begin - self._begin - len(self._content)
            is_near = -len(self._content) <= passed_over < HOP
            self._next_bytes = min(2 * self._next_bytes, MOST_BYTES) if is_near else LEAST_BYTES
        stop = min(self._size, max(end, begin + self._next_bytes)) if self._ahead else end
        self._begin, self._content = begin, self._fetch(begin, stop - begin)

    def readinto(self, into: "memoryview") -> int:  # type: ignore[override]
        content = self.read(len(into))
        into[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
