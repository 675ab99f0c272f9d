"""Reads the samples of a WebDataset shard and their members' offsets from a tar's headers. No torch.

Members belong to one sample if they follow each other and their paths agree up to the first dot of the file's
name (webdataset's rule). At most HEADER_BYTES of headers are read per member, and no content of a member,
however large it is, but for what filters need.
"""

import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, groupby, islice
from operator import attrgetter
from typing import BinaryIO, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from trainer.data.sample_filter import Part, SampleFilter, judged

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
TAIL_BYTES = 2**20
"""Bytes after the last member that are checked; there are rarely more than a few kB of zeros."""
HEADER_BYTES = 2**16
"""Largest number of bytes for one member's headers.

tarfile reads an extended header whole, however large it claims to be.
"""
LARGEST = 2**32 - 1
"""Largest size in bytes that PLACE can hold; it stands for all larger members too, which nobody may read."""
NAMED = 20
"""Number of unusable samples of a shard whose keys are kept."""
PLACE = np.dtype(
    [("image_at", "<i8"), ("image_size", "<u4"), ("text_at", "<i8"), ("text_size", "<u4"), ("key_end", "<u4")]
)
"""Offsets and sizes of one sample in bytes, and the end of its key among the keys.

A size of LARGEST stands for any larger one.
"""


class Member(NamedTuple):
    """A file inside a tar; `offset` and `size` are in bytes."""

    key: str
    ending: str
    offset: int
    size: int


class Flaw(NamedTuple):
    """A sample in a shard that cannot be used."""

    key: str
    cause: str
    """Cause in a few words, the same for many samples, which are counted by it."""


class Selection(NamedTuple):
    """Members that make a sample: the first of the image's endings that it has, and one text."""

    images: tuple[str, ...]
    text: str
    filters: tuple[str, ...] = ()
    """Conditions that a sample must fulfil, as `data.filters` has them."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Values by which an index knows it; two if there are no filters."""
        return tuple(self) if self.filters else tuple(self)[:2]

    def scan(self, file: BinaryIO, _path: str) -> "Content":
        """Returns the samples that the shard's headers describe, up to its end or to the first damage."""
        return read_headers(file, self)


@dataclass(frozen=True)
class Rows:
    """The usable samples of one shard, in the order of the file; the arrays may be a mapped file."""

    places: NDArray[np.void]
    """Offsets and sizes, [samples] of PLACE."""
    keys: NDArray[np.uint8]
    """All keys, one after the other, as bytes."""

    def __len__(self) -> int:
        return len(self.places)

    def key(self, row: int) -> str:
        begin = int(self.places["key_end"][row - 1]) if row else 0
        return (
            self.keys[begin : int(self.places["key_end"][row])].tobytes().decode("utf-8", "surrogateescape")
        )


@dataclass(frozen=True)
class Content:
    """Contents of one shard."""

    rows: Rows
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Samples that lack a member or have one twice, counted by cause."""
    endings: Mapping[str, int] = field(default_factory=dict)
    """All members, counted by ending."""
    flaws: Sequence[Flaw] = ()
    """The first NAMED of the samples that are left out."""
    damage: str = ""
    """Reason why nothing can be read after these samples; empty if the shard was read to its end."""
    lost: int = 0
    """Estimate of the samples after the damage, if they are as large as those before it; 0 if nothing
    follows.
    """
    filtered: Mapping[str, int] = field(default_factory=dict)
    """Samples that a filter has left out, counted by it."""
    groups: Sequence[int] = ()
    """Row groups, which a shard has none of."""

    @property
    def payload(self) -> list[bytes]:
        """The rows as an index stores them."""
        return [self.rows.places.tobytes(), self.rows.keys.tobytes()]

    def __len__(self) -> int:
        return len(self.rows)


def read_headers(file: BinaryIO, selection: Selection, most: int | None = None) -> Content:
    """Returns the samples up to the end of the tar, to the first damage, or the first `most` samples.

    Contents of members are read for the selection's filters only. Raises OSError if reading fails.
    """
    filters = SampleFilter(selection.filters)
    endings: Counter[str] = Counter()
    flaws: list[Flaw] = []
    usable: list[_Usable] = []
    members = _Members(file)
    key = ""
    for key, group in islice(groupby(members, key=attrgetter("key")), most):
        members_of_key = list(group)
        by_ending = {member.ending: member for member in members_of_key}
        endings.update(by_ending.keys())
        image = next(
            (by_ending[ending.lower()] for ending in selection.images if ending.lower() in by_ending), None
        )
        text = by_ending.get(selection.text.lower())
        if len(by_ending) < len(members_of_key):
            flaws.append(Flaw(key, "two members with the same name"))
        elif image is None:
            flaws.append(Flaw(key, "no image"))
        elif text is None:
            flaws.append(Flaw(key, f"no .{selection.text}"))
        else:
            fields = {ending: _part(by_ending[ending]) for ending in filters.members if ending in by_ending}
            usable.append(_Usable(key, image, text, fields))
    if members.damage and flaws and flaws[-1].key == key:
        flaws.pop()  # its missing member may be behind the damage
    lost = round((len(usable) + len(flaws)) * members.bytes_behind / members.end) if members.end else 0
    filtered: Mapping[str, int] = {}
    if selection.filters:
        kept = judged(file, filters, ((_part(sample.image), sample.fields) for sample in usable))
        flaws += [Flaw(usable[number].key, cause) for number, cause in kept.flaws]
        usable, filtered = list(compress(usable, kept.samples)), kept.filtered
    left_out = Counter(flaw.cause for flaw in flaws)
    return Content(_rows(usable), left_out, endings, flaws[:NAMED], members.damage, lost, filtered)


class _Usable(NamedTuple):
    key: str
    image: Member
    text: Member
    fields: Mapping[str, Part]
    """Members that filters need, by ending."""


def _part(member: Member) -> Part:
    return Part(member.offset, member.size)


def _rows(usable: Iterable[_Usable]) -> Rows:
    places, keys = [], bytearray()
    for key, image, text, _ in usable:
        keys += key.encode("utf-8", "surrogateescape")
        places.append(
            (image.offset, min(image.size, LARGEST), text.offset, min(text.size, LARGEST), len(keys))
        )
    return Rows(np.array(places, dtype=PLACE), np.frombuffer(bytes(keys), dtype=np.uint8))


class _Members:
    """Yields the regular, non-empty, complete files of a tar that have a key and an ending."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.damage = ""
        """Reason why there are no more members; empty at the archive's proper end.

        It is set after the last member.
        """
        self.end = self.bytes_behind = 0
        """Bytes up to the damage, and after it."""

    def __iter__(self) -> Iterator[Member]:
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        end, problem = 0, ""
        try:
            for info, behind in headers(self._file):
                end = behind
                if (member := as_member(info)) and member.offset + member.size <= size:
                    yield member
                if behind > size:
                    raise tarfile.ReadError("unexpected end of data")
        except tarfile.TarError as error:
            problem = str(error)
        if not end and problem:
            self.damage = (
                f"not a readable tar file: {_actual_format(self._file) or problem}. Shards are uncompressed "
                "tar files"
            )
        elif problem or self._goes_on(end):
            self.end, self.bytes_behind = end, max(0, size - end)
            self.damage = f"damaged or cut off at byte {min(end, size)}: the samples behind it are lost"

    def _goes_on(self, end: int) -> bool:
        """Returns whether anything but zeros follows.

        tarfile takes a damaged or cut header, and a hole, for the end of the archive; a proper end is zeros
        or nothing.
        """
        self._file.seek(end)
        return bool(self._file.read(TAIL_BYTES).strip(b"\0"))


class Forward(Protocol):
    """A file that tarfile can read headers from; its `seek` only needs to go forward."""

    def read(self, size: int, /) -> bytes: ...
    def seek(self, place: int, /) -> int: ...
    def tell(self) -> int: ...


def headers(file: Forward) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yields each member's header and the offset after the member.

    Raises TarError for headers that cannot be right, however they are made.
    """
    limited = _Limited(file)
    try:
        tar = tarfile.TarFile(fileobj=cast(BinaryIO, limited))
        end = 0
        while (info := tar.next()) is not None:
            if tar.offset <= end:
                raise tarfile.ReadError("a header leads backwards")
            end = tar.offset
            # Without this, tarfile would keep every header that it has read.
            tar.members.clear()  # type: ignore[attr-defined]
            yield info, end
            limited.next_header()
    except (ValueError, OverflowError, RecursionError) as error:
        # The header holds numbers that are malformed, or that no file can have.
        raise tarfile.ReadError(str(error)) from error


def as_member(info: tarfile.TarInfo) -> Member | None:
    """Returns the header's file as a member; None if it is none that a sample can have.

    Such a header is no file, is empty, has no key or ending, or has holes (GNU sparse).
    """
    name = NAME.fullmatch(info.name)
    is_file = info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and info.size > 0 and not info.issparse()
    if not name or not is_file or META.match(info.name):
        return None
    return Member(name["key"], name["ending"].lower(), info.offset_data, info.size)


class _Limited:
    """Passes reads on to the file from which tarfile reads headers, at most HEADER_BYTES for one member."""

    def __init__(self, file: Forward) -> None:
        self._file = file
        self._left = HEADER_BYTES
        self.seek, self.tell = file.seek, file.tell

    def next_header(self) -> None:
        """Starts a new limit, since the previous member has been passed."""
        self._left = HEADER_BYTES

    def read(self, size: int) -> bytes:
        # A read of nothing counts too, so that reading at the end of the file again and again comes to an
        # end.
        self._left -= max(size, 1)
        if self._left < 0:
            raise tarfile.ReadError(f"the headers of a member take more than {HEADER_BYTES:,} bytes")
        return self._file.read(size)


def _actual_format(file: BinaryIO) -> str | None:
    """Returns what the file seems to be instead of a tar; None if unknown."""
    file.seek(0)
    start = file.read(64)
    if not start:
        return "the file is empty"
    return next((meaning for signature, meaning in FORMATS.items() if start.startswith(signature)), None)
