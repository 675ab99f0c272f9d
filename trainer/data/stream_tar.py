"""Reads the members of tars that come through pipes, compressed or not. No torch.

It reads forward, with a limit of bytes for each member. webdataset's own reader, and tarfile's for pipes,
read each member whole and unpack whatever a block of compressed bytes holds.
"""

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, cast

from trainer.data.tar import as_member, headers

DAMAGES = (OSError, EOFError, ValueError, tarfile.TarError, zlib.error, lzma.LZMAError)
"""Exceptions that reading a damaged stream raises."""
_UNPACKED = {b"\x1f\x8b": gzip.GzipFile, b"BZh": bz2.BZ2File, b"\xfd7zXZ": lzma.LZMAFile}
_SKIPPED_AT_ONCE = 2**20


def members(
    streams: Iterable[Mapping[str, Any]], *, wanted: Collection[str], most_bytes: int
) -> Iterator[dict[str, Any]]:
    """Yields webdataset's records of files: the content of wanted members, else their size in bytes.

    A member is wanted if its ending is in `wanted` and it has at most `most_bytes` bytes. An empty record
    follows each stream, so that no sample begins in one and ends in the next.
    """
    for stream in streams:
        file = _Forward(_unpacked(stream["stream"]))
        for info, _ in headers(file):
            if member := as_member(info):
                content: bytes | int = member.size
                if member.ending in wanted and member.size <= most_bytes:
                    file.seek(member.offset)
                    content = file.read(member.size)
                    if len(content) < member.size:
                        raise tarfile.ReadError("unexpected end of data")
                yield {"fname": info.name, "data": content, "__url__": stream["url"]}
        yield {}


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
    """Counts the bytes that are read; `seek` reads on to a later offset."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._at = file, 0

    def tell(self) -> int:
        return self._at

    def read(self, size: int) -> bytes:
        content = self._file.read(size)
        self._at += len(content)
        return content

    def seek(self, place: int) -> int:
        while self._at < place and self.read(min(_SKIPPED_AT_ONCE, place - self._at)):
            pass
        return self._at
