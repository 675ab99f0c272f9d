"""What a tar holds, read from its headers alone: the samples of a WebDataset shard and where their members lie. No torch.

Members belong to one sample when they follow each other and their paths agree up to the first dot of the file's name (webdataset's rule).
"""

import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.errors import InputError

NAME = re.compile(r"(?P<key>(?:.*/)?[^./]+)\.(?P<ending>[^/]*)", re.DOTALL)
META = re.compile(r"__[^/]*__($|/)")
FORMATS = {
    b"\x1f\x8b": "gzip data",
    b"BZh": "bzip2 data",
    b"\xfd7zXZ": "xz data",
    b"\x28\xb5\x2f\xfd": "zstd data",
    b"PK\x03\x04": "a zip file",
    b"version https://git-lfs": "a Git LFS pointer: fetch the file itself",
    b"<": "text like HTML or XML: a failed download?",
}
PLACE = np.dtype([("image_at", "<i8"), ("image_size", "<u4"), ("text_at", "<i8"), ("text_size", "<u4"), ("key_end", "<u4")])
"""Of one sample: places and sizes in bytes, and where its key ends among the keys."""


class Member(NamedTuple):
    """A file inside a tar: sizes and places in bytes."""

    key: str
    ending: str
    offset: int
    size: int


class Selection(NamedTuple):
    """Which members make a sample: the first of the image's endings that it has, and one text."""

    images: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Rows:
    """The usable samples of one shard, in the order of the file; the arrays may be a file that is mapped."""

    places: NDArray[np.void]
    """[samples] of PLACE."""
    keys: NDArray[np.uint8]
    """All keys, one after the other."""

    def __len__(self) -> int:
        return len(self.places)

    def key(self, row: int) -> str:
        begin = int(self.places["key_end"][row - 1]) if row else 0
        return self.keys[begin : int(self.places["key_end"][row])].tobytes().decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class Content:
    """What was found in one shard."""

    rows: Rows
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Samples that lack a member, counted by cause."""
    endings: Mapping[str, int] = field(default_factory=dict)
    """All members, counted by ending."""

    def __len__(self) -> int:
        return len(self.rows)


def read_headers(file: BinaryIO, path: str, selection: Selection) -> Content:
    """Raises InputError for what is no readable tar, naming what was found; OSError where reading fails."""
    endings: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    usable = []
    for key, group in groupby(_members(file, path), key=attrgetter("key")):
        members = {member.ending: member for member in _distinct(path, group)}
        endings.update(members.keys())
        image = next((members[ending.lower()] for ending in selection.images if ending.lower() in members), None)
        text = members.get(selection.text.lower())
        if image is None:
            left_out["no image"] += 1
        elif text is None:
            left_out[f"no .{selection.text}"] += 1
        else:
            usable.append((key, image, text))
    return Content(_rows(usable), left_out, endings)


def _rows(usable: Iterable[tuple[str, Member, Member]]) -> Rows:
    places, keys = [], bytearray()
    for key, image, text in usable:
        keys += key.encode("utf-8", "surrogateescape")
        places.append((image.offset, image.size, text.offset, text.size, len(keys)))
    return Rows(np.array(places, dtype=PLACE), np.frombuffer(bytes(keys), dtype=np.uint8))


def _members(file: BinaryIO, path: str) -> Iterator[Member]:
    """The regular, non-empty files of the tar that have a key and an ending."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (info := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep every header that it has read
                name = NAME.fullmatch(info.name)
                if name and info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and info.size and not META.match(info.name):
                    yield Member(name["key"], name["ending"].lower(), info.offset_data, info.size)
            _check_end(tar)
    except tarfile.TarError as error:
        raise InputError(f"{path}: not a readable tar file: {_found(file) or error}. Shards are tar files, not compressed") from error


def _check_end(tar: tarfile.TarFile) -> None:
    """tarfile takes a damaged or cut header for the end of the archive; the end is zeros, or nothing."""
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise tarfile.ReadError(f"damaged or cut off at byte {tar.offset}")


def _found(file: BinaryIO) -> str | None:
    """What the file seems to be instead of a tar."""
    file.seek(0)
    start = file.read(64)
    if not start:
        return "the file is empty"
    return next((meaning for signature, meaning in FORMATS.items() if start.startswith(signature)), None)


def _distinct(path: str, group: Iterator[Member]) -> Iterator[Member]:
    seen = set()
    for member in group:
        if member.ending in seen:
            raise InputError(f"{path}: two members are named {member.key}.{member.ending}: one sample cannot hold both")
        seen.add(member.ending)
        yield member
