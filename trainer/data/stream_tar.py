"""Reads the members of tars that come through pipes, compressed or not. No torch.

It reads forward, with a limit of bytes for each member. webdataset's own reader, and tarfile's for pipes,
read each member whole and unpack whatever a block of compressed bytes holds.
"""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO, cast

from trainer.data.tar import Member, Members, with_contents

_DAMAGES = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
"""Exceptions that reading a damaged stream raises."""
_UNPACKED = {b"\x1f\x8b": gzip.GzipFile, b"BZh": bz2.BZ2File, b"\xfd7zXZ": lzma.LZMAFile}
_SKIPPED_AT_ONCE = 2**20
_MOST_AGAIN = 2**16
"""Largest number of bytes of a read that can be read again."""


class StreamMembers:
    """Yields the members of the tars in a stream, with the content of those that are wanted.

    A member is wanted if its ending is in `wanted` and it has at most `most_bytes` bytes.
    """

    def __init__(self, stream: BinaryIO, *, wanted: Collection[str], most_bytes: int) -> None:
        self._stream, self._wanted, self._most_bytes = stream, wanted, most_bytes
        self.damage = ""
        """Reason why there are no more members; empty at the stream's proper end.

        It is set after the last member.
        """

    def __iter__(self) -> Iterator[Member]:
        try:
            file = _Forward(_unpacked(self._stream))
            members = Members(file)
            yield from with_contents(members, file, self._wanted_bytes)
            self.damage = members.damage
        except _DAMAGES as error:
            self.damage = " ".join(str(error).split())

    def _wanted_bytes(self, member: Member) -> int:
        return member.size if member.ending in self._wanted and member.size <= self._most_bytes else 0


def _unpacked(stream: BinaryIO) -> BinaryIO:
    """Returns the stream, unpacked if its first bytes say that it is compressed.

    It never unpacks more than is asked for.
    """
    buffered = io.BufferedReader(_Raw(stream))
    start = buffered.peek(8)
    unpack = next((unpack for signature, unpack in _UNPACKED.items() if start.startswith(signature)), None)
    return cast(
        BinaryIO,
        gzip.GzipFile(fileobj=buffered)
        if unpack is gzip.GzipFile
        else unpack(buffered)
        if unpack
        else buffered,
    )


class _Raw(io.RawIOBase):
    """Wraps a stream that only has `read`, as the pipes of webdataset do."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        content = self._stream.read(len(into))
        into[: len(content)] = content
        return len(content)


class _Forward:
    """Counts the bytes that are read; `seek` reads on to a later place, or goes back within the last read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._at = file, 0
        self._last = self._again = b""
        """Bytes that were read last, and those that are read again."""

    def tell(self) -> int:
        return self._at

    def read(self, size: int) -> bytes:
        content, self._again = self._again[:size], self._again[size:]
        if len(content) < size:
            content += self._file.read(size - len(content))
        self._at += len(content)
        self._last = content if len(content) <= _MOST_AGAIN else b""
        return content

    def seek(self, place: int) -> int:
        if 0 < (back := self._at - place) <= len(self._last):
            self._again, self._last = self._last[-back:] + self._again, b""
            self._at = place
        while self._at < place and self.read(min(_SKIPPED_AT_ONCE, place - self._at)):
            pass
        return self._at
