"""Reads the samples of a WebDataset shard and their members' offsets from a tar's headers. No torch.

Members belong to one sample if they follow each other and their paths agree up to the first dot of the file's
name (webdataset's rule). At most HEADER_BYTES of headers are read per member, and no content of a member,
however large it is, but for what filters need.
"""

import math
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from trainer.config.filters import rules_of
from trainer.data.entry import Content, Entry
from trainer.data.groups import NO_GROUP
from trainer.data.sample_filter import MemberPlace, SampleFilter

if TYPE_CHECKING:
    from trainer.data.scores import Scores

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
_TAIL_OF_ONE = tarfile.RECORDSIZE + 3 * tarfile.BLOCKSIZE
"""Bytes after the last member of an archive in which the next one begins, if one follows."""
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
RULES = 2
"""Number of the rules by which samples are found and counted; an index by older ones is made again."""
DOTS = "a dot in the name, where the key ends: rename a.b.jpg to a-b.jpg"
"""Cause of a sample whose key, up to the first dot of the file's name, is that of others."""
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
    unfit: str = ""
    """Reason why no sample can have it, as what follows its name; empty for a plain file with content."""
    content: bytes | None = None
    """Its bytes, or as many of its first as are needed, if they were read with its header."""


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
    scores: "Scores | None" = None
    """Tables with values that the filters compare."""
    group_by: str | None = None
    """Field with the id of each sample's group."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Values by which an index knows it."""
        own: tuple[object, ...] = (RULES, *self[:3], *rules_of(self.filters))
        if self.scores is not None:
            own += (self.scores.identity, self.scores.by, self.scores.depth)
        return own if self.group_by is None else (*own, f"grouped by {self.group_by}")

    def scan(self, file: BinaryIO, path: str) -> Content:
        """Returns the samples that the shard's headers describe, up to its end or to the first damage."""
        return read_headers(file, self, path=path)


@dataclass(frozen=True)
class Rows:
    """The usable samples of one shard, in the order of the file; the arrays may be a mapped file."""

    places: NDArray[np.void]
    """Offsets and sizes, [samples] of PLACE."""
    keys: NDArray[np.uint8]
    """All keys, one after the other, as bytes."""
    groups: NDArray[np.int64] | None = None
    """Number of each sample's group; None if no groups were asked for."""

    @classmethod
    def of(cls, payload: memoryview | bytes, samples: int) -> "Rows":
        """Returns the rows by what `payload` has stored of them."""
        places = np.frombuffer(payload, dtype=PLACE, count=samples)
        rest = np.frombuffer(payload, dtype=np.uint8, offset=samples * PLACE.itemsize)
        end = int(places["key_end"][-1]) if samples else 0
        return cls(places, rest[:end], rest[end:].view("<i8") if len(rest) > end else None)

    @property
    def payload(self) -> list[bytes]:
        """The rows as an index stores them."""
        groups = [] if self.groups is None else [self.groups.astype("<i8").tobytes()]
        return [self.places.tobytes(), self.keys.tobytes(), *groups]

    def __len__(self) -> int:
        return len(self.places)

    def key(self, row: int) -> str:
        begin = int(self.places["key_end"][row - 1]) if row else 0
        return (
            self.keys[begin : int(self.places["key_end"][row])].tobytes().decode("utf-8", "surrogateescape")
        )

    def group(self, row: int) -> int:
        return NO_GROUP if self.groups is None else int(self.groups[row])


def read_headers(file: BinaryIO, selection: Selection, most: int | None = None, path: str = "") -> Content:
    """Returns the samples up to the end of the tar, to the first damage, or those of the first `most` keys.

    Contents of members are read for the selection's filters only. `path` is the shard's, by which scores are
    found. Raises OSError if reading fails, and InputError for scores that cannot be read.
    """
    scores = selection.scores and selection.scores.of_shard(path)
    filters = SampleFilter(selection.filters, scores, selection.group_by)
    images = [ending.lower() for ending in selection.images]
    endings: Counter[str] = Counter()
    filtered: Counter[str] = Counter()
    flaws: list[Flaw] = []
    unjudged: list[Flaw] = []
    usable: list[_Usable] = []
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    members = Members(file, size)
    groups = grouped(
        with_contents(members, file, lambda member: filters.head_bytes(member.ending, member.size, images))
    )
    for key, group in islice(groups, most):
        found = judged_group(key, group, selection)
        endings.update(found.endings)
        if found.flaws:  # the missing member of the last key may be behind the damage
            flaws += (flaw for flaw in found.flaws if not members.damage or flaw.key != key)
        if found.image is not None and found.text is not None:
            fields = {name: _part(found.by_ending[name]) for name in filters.members & found.by_ending.keys()}
            values: dict[str, Any] = {}
            try:
                failed = filters.failed(key, file, _part(found.image), fields, values)
                group_number = NO_GROUP if failed else filters.group(file, fields, values)
            except ValueError as error:
                unjudged.append(Flaw(key, str(error)))
                continue
            if failed is None:
                usable.append(_Usable(key, *found.image[2:4], *found.text[2:4], group_number))
            else:
                filtered[failed] += 1
    whole = next(groups, None) is None
    flaws = _apart(flaws, selection)
    seen = len(usable) + filtered.total() + len(unjudged) + len(flaws)
    lost = round(seen * members.bytes_behind / members.end) if members.end else 0
    flaws += unjudged
    left_out = Counter(flaw.cause for flaw in flaws)
    counts = (dict(left_out), dict(endings))  # `asdict`, by which an index is written, takes no Counter
    entry = Entry(0, "", len(usable), "", *counts, flaws[:NAMED], members.damage, lost, dict(filtered))
    return Content(entry, _rows(usable, grouped=selection.group_by is not None).payload, whole)


def grouped(members: Iterable[Member]) -> Iterator[tuple[str, list[Member]]]:
    """Yields keys and their members: those that follow each other, by webdataset's rule.

    Unfit members are with the others of their key that they stand among or before; between those of another
    key they do not part them, since webdataset does not see them. Without others they are keys of their own.
    """
    key, group, unfit = "", list[Member](), list[Member]()
    for member in members:
        if member.unfit:
            (group if group and member.key == key else unfit).append(member)
        elif group and member.key == key:
            group.append(member)
        else:
            if group:
                yield key, group
            key, group = member.key, [member]
            if unfit:
                group += (other for other in unfit if other.key == key)
                yield from _by_key(other for other in unfit if other.key != key)
                unfit = []
    if group:
        yield key, group
    yield from _by_key(unfit)


def with_contents(
    members: Iterable[Member], file: "Forward", wanted: Callable[[Member], int]
) -> Iterator[Member]:
    """Yields the members, with as many of their first bytes as `wanted` says.

    What comes again under one name is counted, and takes no memory.
    """
    key, held = "", set[str]()
    for member in members:
        if member.key != key:
            key, held = member.key, set()
        size = 0 if member.unfit or member.ending in held else wanted(member)
        if not size:
            yield member
            continue
        held.add(member.ending)
        file.seek(member.offset)
        content = file.read(size)
        if len(content) == size:  # else the next header is missing, too
            yield member._replace(content=content)


def _by_key(members: Iterable[Member]) -> Iterator[tuple[str, list[Member]]]:
    return ((key, list(group)) for key, group in groupby(members, key=attrgetter("key")))


class FoundInGroup(NamedTuple):
    """Content of the members of one key."""

    by_ending: Mapping[str, Member]
    """The members that are files, by ending."""
    image: Member | None
    """The image of the sample; None, as is its text, if there is no usable sample."""
    text: Member | None
    endings: Iterable[str]
    """Endings for a count; "*.jpg" if a key that ends too early is part of them."""
    flaws: Sequence[Flaw] = ()
    """One for each sample that cannot be used."""


def judged_group(key: str, group: Sequence[Member], selection: Selection) -> FoundInGroup:
    """Returns what the members of one key hold: a usable sample or none, and flaws."""
    by_ending = {member.ending: member for member in group if not member.unfit}
    image = next(
        (by_ending[ending] for each in selection.images if (ending := each.lower()) in by_ending), None
    )
    text = by_ending.get(selection.text.lower())
    whole = image is not None and text is not None and len(by_ending) == len(group)
    if whole and "." not in "".join(by_ending):
        return FoundInGroup(by_ending, image, text, by_ending.keys())
    files = sum(not member.unfit for member in group)
    cause = _cause(group, selection, image, text, twice=len(by_ending) < files)
    counts, shown = _parts(group, selection)
    own = max(counts.pop("", [0]))
    flaws = [Flaw(key, cause)] * (own if own or counts else min(files, 1)) if cause else []
    hidden = _hidden(counts, alone=bool(cause) and not own)
    flaws += [Flaw(f"{key}.{part}", DOTS) for part, count in hidden.items() for _ in range(count)]
    endings = [shown.get(ending, ending) for ending in by_ending]
    endings += [""] * sum(not member.ending for member in group)
    if cause:
        image = text = None
    return FoundInGroup(by_ending, image, text, endings, flaws)


def _cause(
    group: Sequence[Member], selection: Selection, image: Member | None, text: Member | None, *, twice: bool
) -> str:
    """Returns why the members of a key make no sample; empty if they do."""
    if twice:
        return "two members with the same name"
    for found, wanted, missing in (
        (image, selection.images, "no image"),
        (text, (selection.text,), f"no .{selection.text}"),
    ):
        if found is None:
            endings = [ending.lower() for ending in wanted]
            unfit = (f".{member.ending} {member.unfit}" for member in group if member.ending in endings)
            return next(unfit, missing)
    return ""


def _parts(group: Sequence[Member], selection: Selection) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Returns how many images and texts a key has, and the endings as they are counted, by the members' own.

    They are counted by what stands between the key and their endings, such as v2.0001 of scan.v2.0001.jpg. A
    name that comes again counts as another sample.
    """
    counts: dict[str, list[int]] = {}
    shown: dict[str, str] = {}
    names = [(ending.lower(), 0) for ending in selection.images] + [(selection.text.lower(), 1)]
    for ending, count in Counter(member.ending for member in group).items():
        for name, kind in names:
            if ending == name or ending.endswith(f".{name}"):
                of_part = counts.setdefault(ending[: -len(name) - 1], [0, 0])
                of_part[kind] = max(of_part[kind], count)
                shown[ending] = ending if ending == name else f"*.{name}"
                break
    return counts, shown


def _hidden(counts: Mapping[str, Sequence[int]], *, alone: bool) -> Mapping[str, int]:
    """Returns the number of samples that a key hides, by what stands between, of the counts of such parts.

    They are pairs. Without a pair, and if they are `alone` since the key has no sample, they are its images
    or its texts.
    """
    pairs = {part: max(of_part) for part, of_part in counts.items() if all(of_part)}
    if pairs or not alone:
        return pairs
    of_kinds = [{part: of_part[kind] for part, of_part in counts.items() if of_part[kind]} for kind in (0, 1)]
    return max(of_kinds, key=len)


def halves_of(selection: Selection) -> tuple[str, str]:
    """Returns the causes of keys that have a text alone, and an image alone."""
    return "no image", f"no .{selection.text}"


def apart(selection: Selection) -> str:
    """Returns the cause of samples whose image and text do not follow each other."""
    remedy = "unpack it, and in that folder: find * -type f | sort | tar cf NEW.tar -T -"
    return f"image and .{selection.text} do not follow each other: {remedy}"


def _apart(flaws: list[Flaw], selection: Selection) -> list[Flaw]:
    """Returns the flaws with one for each key of which image and text are in different places of the tar."""
    halves = halves_of(selection)
    without = [{flaw.key for flaw in flaws if flaw.cause == half} for half in halves]
    both = without[0] & without[1]
    if not both:
        return flaws
    named = dict.fromkeys(flaw.key for flaw in flaws if flaw.key in both)
    rest = [flaw for flaw in flaws if flaw.key not in both or flaw.cause not in halves]
    return [*(Flaw(key, apart(selection)) for key in named), *rest]


class Forward(Protocol):
    """A file that headers can be read from.

    Its `seek` needs to go forward, and back over what was read last.
    """

    def read(self, size: int, /) -> bytes: ...
    def seek(self, place: int, /) -> int: ...
    def tell(self) -> int: ...


class _Usable(NamedTuple):
    key: str
    image_at: int
    image_size: int
    text_at: int
    text_size: int
    group: int


def _part(member: Member) -> MemberPlace:
    return MemberPlace(member.offset, member.size, member.content or b"")


def _rows(usable: Sequence[_Usable], *, grouped: bool) -> Rows:
    places, keys = [], bytearray()
    for key, image_at, image_size, text_at, text_size, _ in usable:
        keys += key.encode("utf-8", "surrogateescape")
        places.append((image_at, min(image_size, LARGEST), text_at, min(text_size, LARGEST), len(keys)))
    groups = np.array([each.group for each in usable], dtype=np.int64) if grouped else None
    return Rows(np.array(places, dtype=PLACE), np.frombuffer(bytes(keys), dtype=np.uint8), groups)


class Members:
    """Yields the complete files of a tar that have a key and an ending, and those that a sample cannot have.

    Archives may follow each other, as `cat` puts them.
    """

    def __init__(self, file: Forward, size: float = math.inf) -> None:
        """`size` is that of the file in bytes, if it is known."""
        self._file, self._size = file, size
        self.damage = ""
        """Reason why there are no more members; empty at the archive's proper end.

        It is set after the last member.
        """
        self.end = self.bytes_behind = 0
        """Bytes up to the damage, and after it, if the size is known."""

    def __iter__(self) -> Iterator[Member]:
        start = self._file.read(64)
        self._file.seek(0)
        end = 0
        try:
            for info, end in headers(self._file):
                if (member := as_member(info)) and member.offset + member.size <= self._size:
                    yield member
                if end > self._size:
                    raise tarfile.ReadError("unexpected end of data")
        except tarfile.TarError as error:
            self._damaged(end, _actual_format(start) or str(error))

    def _damaged(self, end: int, problem: str) -> None:
        known = self._size < math.inf
        if not end:
            advice = ". Shards are uncompressed tar files" if known else ""  # streams may be compressed
            self.damage = f"not a readable tar file: {problem}{advice}"
            return
        self.end, self.bytes_behind = end, max(0, int(self._size) - end) if known else 0
        at = min(end, self._size if known else self._file.tell())
        self.damage = f"damaged or cut off at byte {at}: the samples behind it are lost"


def headers(file: Forward) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yields each member's header and the offset after the member, archive by archive.

    Raises TarError for headers that cannot be right, however they are made, and if anything but zeros or
    another archive follows an archive: tarfile takes a damaged or cut header, and a hole, for its end.
    """
    begin: int | None = 0
    while begin is not None:
        end = begin
        for info, end in _headers_of_one(file):
            yield info, end
        begin = _next_archive(file, begin, end)


def _next_archive(file: Forward, begin: int, end: int) -> int | None:
    """Returns where the archive after that from `begin` to `end` begins; None if nothing but zeros follow."""
    file.seek(end)
    tail = file.read(_TAIL_OF_ONE)
    if not tail.strip(b"\0"):
        if len(tail) == _TAIL_OF_ONE and file.read(TAIL_BYTES).strip(b"\0"):
            raise tarfile.ReadError("data follow a hole")
        return None
    zeros = len(tail) - len(tail.lstrip(b"\0"))
    found = end + zeros // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE
    least = end + 2 * tarfile.BLOCKSIZE
    if found not in (least, begin + -(-(least - begin) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE):
        raise tarfile.ReadError("other data follow")
    file.seek(found)
    return found


def _headers_of_one(file: Forward) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yields the headers of the archive that begins where the file is."""
    limited = _Limited(file)
    end = file.tell()
    try:
        tar = tarfile.TarFile(fileobj=cast(BinaryIO, limited))
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
    """Returns the header's file as a member; None for folders and what is there for webdataset or macOS."""
    fit = info.type in _FILES and info.size > 0 and not info.issparse()
    if META.match(info.name) or (not fit and info.isdir()):
        return None
    if name := NAME.fullmatch(info.name):
        unfit = "" if fit else _kind(info)
        return Member(name["key"], name["ending"].lower(), info.offset_data, info.size, unfit)
    return _without_key(info.name)


def _without_key(path: str) -> Member | None:
    """Returns an unfit member for a file's name that has no key or no ending."""
    folder, slash, name = path.rpartition("/")
    if name.startswith("._"):  # what macOS keeps of a file beside it
        return None
    stem, _, ending = name.rpartition(".")
    key = f"{folder}{slash}{stem or name}"
    return Member(key, ending.lower() if stem else "", 0, 0, "has a name that begins with a dot")


def _kind(info: tarfile.TarInfo) -> str:
    """Returns what a member is that is no plain file with content."""
    if info.islnk() or info.issym():
        return "is a link"
    if info.issparse():
        return "has holes (a sparse file)"
    return "is empty" if info.type in _FILES else "is no file"


_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE)


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


def _actual_format(start: bytes) -> str | None:
    """Returns what the file seems to be instead of a tar by its first bytes; None if unknown."""
    if not start:
        return "the file is empty"
    return next((meaning for signature, meaning in FORMATS.items() if start.startswith(signature)), None)
