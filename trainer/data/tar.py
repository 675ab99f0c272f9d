"""What a tar holds, read from its headers alone: the samples of a WebDataset shard and where their members lie. No torch.

Members belong to one sample when they follow each other and their paths agree up to the first dot of the file's name (webdataset's rule).
"""

import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
LOOKED_AT = 2**20
"""Bytes behind the last member: rarely are there more than a few kB of zeros."""
NAMED = 20
"""Of the samples that a shard's headers show to be of no use, those whose keys are kept."""
PLACE = np.dtype([("image_at", "<i8"), ("image_size", "<u4"), ("text_at", "<i8"), ("text_size", "<u4"), ("key_end", "<u4")])
"""Of one sample: places and sizes in bytes, and where its key ends among the keys."""


class Member(NamedTuple):
    """A file inside a tar: sizes and places in bytes."""

    key: str
    ending: str
    offset: int
    size: int


class Flaw(NamedTuple):
    """A sample that stands in a shard and cannot be used."""

    key: str
    cause: str
    """A few words that many share: they are counted by it."""


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
    """Samples that lack a member or have one twice, counted by cause."""
    endings: Mapping[str, int] = field(default_factory=dict)
    """All members, counted by ending."""
    flaws: Sequence[Flaw] = ()
    """The first NAMED of the samples left out."""
    damage: str = ""
    """Why nothing can be read behind these samples; empty where the shard was read to its end."""
    lost: int = 0
    """Samples that fit into what stands behind the damage, if they are as large as those before it; 0 where nothing stands there."""

    def __len__(self) -> int:
        return len(self.rows)


def read_headers(file: BinaryIO, selection: Selection) -> Content:
    """The samples up to the end of the tar, or to the first damage. Raises OSError where reading fails."""
    endings: Counter[str] = Counter()
    flaws: list[Flaw] = []
    usable = []
    members = _Members(file)
    key = ""
    for key, group in groupby(members, key=attrgetter("key")):
        found = list(group)
        by_ending = {member.ending: member for member in found}
        endings.update(by_ending.keys())
        image = next((by_ending[ending.lower()] for ending in selection.images if ending.lower() in by_ending), None)
        text = by_ending.get(selection.text.lower())
        if len(by_ending) < len(found):
            flaws.append(Flaw(key, "two members of one name"))
        elif image is None:
            flaws.append(Flaw(key, "no image"))
        elif text is None:
            flaws.append(Flaw(key, f"no .{selection.text}"))
        else:
            usable.append((key, image, text))
    if members.damage and flaws and flaws[-1].key == key:
        flaws.pop()  # what it lacks may stand behind the damage
    left_out = Counter(flaw.cause for flaw in flaws)
    lost = round((len(usable) + len(flaws)) * members.bytes_behind / members.end) if members.end else 0
    return Content(_rows(usable), left_out, endings, flaws[:NAMED], members.damage, lost)


def _rows(usable: Iterable[tuple[str, Member, Member]]) -> Rows:
    places, keys = [], bytearray()
    for key, image, text in usable:
        keys += key.encode("utf-8", "surrogateescape")
        places.append((image.offset, image.size, text.offset, text.size, len(keys)))
    return Rows(np.array(places, dtype=PLACE), np.frombuffer(bytes(keys), dtype=np.uint8))


class _Members:
    """The regular, non-empty files of a tar that have a key and an ending and stand there whole."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.damage = ""
        """After the last member: why there are no more, where it is not the archive's end."""
        self.end = self.bytes_behind = 0
        """Bytes up to the damage, and after it."""

    def __iter__(self) -> Iterator[Member]:
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        end, problem = 0, ""
        try:
            with tarfile.open(fileobj=self._file, mode="r:") as tar:
                while (info := tar.next()) is not None:
                    end = tar.offset
                    tar.members.clear()  # type: ignore[attr-defined]  # it would keep every header that it has read
                    name = NAME.fullmatch(info.name)
                    is_file = info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and info.size and info.offset_data + info.size <= size
                    if name and is_file and not META.match(info.name):
                        yield Member(name["key"], name["ending"].lower(), info.offset_data, info.size)
        except tarfile.TarError as error:
            problem = str(error)
        if not end and problem:
            self.damage = f"not a readable tar file: {_found(self._file) or problem}. Shards are tar files, not compressed"
        elif problem or self._goes_on(end):
            self.end, self.bytes_behind = end, max(0, size - end)
            self.damage = f"damaged or cut off at byte {min(end, size)}: what stood behind it is lost"

    def _goes_on(self, end: int) -> bool:
        """tarfile takes a damaged or cut header, and a hole, for the end of the archive; the end is zeros, or nothing."""
        self._file.seek(end)
        return bool(self._file.read(LOOKED_AT).strip(b"\0"))


def _found(file: BinaryIO) -> str | None:
    """What the file seems to be instead of a tar."""
    file.seek(0)
    start = file.read(64)
    if not start:
        return "the file is empty"
    return next((meaning for signature, meaning in FORMATS.items() if start.startswith(signature)), None)
