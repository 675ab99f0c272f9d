"""WebDataset shards: an index made from the tar headers alone, and samples read by their place in the file. No torch.

Members belong to one sample when they follow each other and their paths agree up to the first dot of the file's name (webdataset's rule).
"""

import os
import re
import tarfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.data.sample import BadSample, Numbering, RawSample
from trainer.errors import InputError
from trainer.job import is_remote

Meaning = Literal["captions", "label"]
"""What the text member of a sample holds."""

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
KEYS_OF_JOB = {
    "captions": "data.image_key and data.caption_key",
    "label": "data.image_key and eval.class_key",
}
INDEXING_THREADS = 16
OPEN_FILES = 64
SHOWN = 5


class Member(NamedTuple):
    """A file inside a tar: sizes and places in bytes."""

    key: str
    ending: str
    offset: int
    size: int


@dataclass(frozen=True)
class ShardIndex:
    """The usable samples of one shard, in the order of the file."""

    path: str
    keys: tuple[str, ...]
    images: NDArray[np.int64]
    """[samples, 2]: offset and size in bytes of the image member."""
    texts: NDArray[np.int64]
    """[samples, 2]: the same for the captions or the label."""
    left_out: Mapping[str, int]
    """Samples that lack a member, counted by cause."""
    endings: Mapping[str, int]
    """All members, counted by ending."""


class ShardSource:
    """The samples of several shards."""

    def __init__(self, shards: Sequence[ShardIndex], meaning: Meaning) -> None:
        self._shards = tuple(shards)
        self._meaning = meaning
        self._numbering = Numbering(self.shard_sizes())
        self._files = OpenFiles()

    @property
    def left_out(self) -> Mapping[str, int]:
        return sum((Counter(shard.left_out) for shard in self._shards), Counter())

    def __len__(self) -> int:
        return self._numbering.samples

    def shard_sizes(self) -> list[int]:
        return [len(shard.keys) for shard in self._shards]

    def read(self, index: int) -> RawSample:
        number, row = self._numbering.locate(index)
        shard = self._shards[number]
        try:
            text = self._files.read(shard.path, *shard.texts[row].tolist())
            image = self._files.read(shard.path, *shard.images[row].tolist())
            if self._meaning == "label":
                return RawSample(shard.keys[row], shard.path, image, (), parse_label(text))
            return RawSample(shard.keys[row], shard.path, image, parse_captions(text))
        except ValueError as error:
            raise BadSample(shard.path, shard.keys[row], f"bad {self._meaning}", str(error)) from error
        except OSError as error:
            raise InputError(f"{shard.path}: sample {shard.keys[row]}: {error}") from error


class OpenFiles:
    """The files read last, kept open; pickled without them. Reads name their place, so forked processes may share a file."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, int] = OrderedDict()

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Raises OSError, also where the file ends before `size` bytes."""
        file = self._open(path)
        parts = []
        while size and (part := os.pread(file, size, offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        if size:
            raise OSError(f"the file now ends {size} bytes too early: it changed after it was indexed")
        return b"".join(parts)

    def _open(self, path: str) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if len(self._files) > OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
        self._files.move_to_end(path)
        return self._files[path]

    def __getstate__(self) -> dict[str, object]:
        return {"_files": OrderedDict()}

    def __del__(self) -> None:
        for file in self._files.values():
            os.close(file)


def open_shards(
    paths: Sequence[str],
    image_endings: Sequence[str],
    text_ending: str,
    meaning: Meaning,
    progress: Callable[[int, int], None] | None = None,
) -> ShardSource:
    """Index the shards; `progress(shards done, shards)`. Raises InputError naming every bad shard, or where no sample is usable."""
    shards: list[ShardIndex] = []
    problems: list[str] = []
    # Threads, because on a network file system each header is a round trip.
    with ThreadPoolExecutor(INDEXING_THREADS) as pool:
        for done, result in enumerate(
            pool.map(lambda path: _index_or_problem(path, image_endings, text_ending), paths),
            start=1,
        ):
            if isinstance(result, ShardIndex):
                shards.append(result)
            else:
                problems.append(str(result))
            if progress:
                progress(done, len(paths))
    if problems:
        more = [f"and {len(problems) - SHOWN} more shards"] if len(problems) > SHOWN else []
        raise InputError("\n".join(problems[:SHOWN] + more))
    source = ShardSource(shards, meaning)
    if not len(source):
        raise InputError(_nothing_usable(shards, image_endings, text_ending, meaning))
    return source


def index_shard(path: str, image_endings: Sequence[str], text_ending: str) -> ShardIndex:
    """Reads headers only. Raises InputError for what is no readable tar, naming what was found."""
    keys, images, texts = [], [], []
    left_out: Counter[str] = Counter()
    endings: Counter[str] = Counter()
    for key, group in groupby(_members(path), key=attrgetter("key")):
        members = {member.ending: member for member in _distinct(path, group)}
        endings.update(members.keys())
        image = next(
            (members[ending.lower()] for ending in image_endings if ending.lower() in members),
            None,
        )
        text = members.get(text_ending.lower())
        if image is None:
            left_out["no image"] += 1
        elif text is None:
            left_out[f"no .{text_ending}"] += 1
        else:
            keys.append(key)
            images.append((image.offset, image.size))
            texts.append((text.offset, text.size))
    return ShardIndex(path, tuple(keys), _places(images), _places(texts), left_out, endings)


def parse_captions(text: bytes) -> tuple[str, ...]:
    """The lines that are not empty, stripped; ValueError where there is none or the text is not UTF-8."""
    try:
        lines = text.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"captions are not UTF-8 ({error.reason} at byte {error.start})") from error
    captions = tuple(line.strip() for line in lines if line.strip())
    if not captions:
        raise ValueError("captions are empty")
    return captions


def parse_label(text: bytes) -> int:
    """A class number from 0; ValueError for anything else."""
    if not text.strip().isdigit():
        raise ValueError(f"label must be a class number from 0, given {text[:40]!r}")
    return int(text)


def _index_or_problem(path: str, image_endings: Sequence[str], text_ending: str) -> ShardIndex | InputError:
    try:
        return index_shard(path, image_endings, text_ending)
    except InputError as error:
        return error


def _members(path: str) -> Iterator[Member]:
    """The regular, non-empty files of the tar that have a key and an ending."""
    try:
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                name = NAME.fullmatch(info.name)
                if name and info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and info.size and not META.match(info.name):
                    yield Member(name["key"], name["ending"].lower(), info.offset_data, info.size)
            _check_end(tar)
    except tarfile.TarError as error:
        raise InputError(f"{path}: not a readable tar file: {_found(path) or error}. Shards are tar files, not compressed") from error
    except OSError as error:
        way_out = "; shards are read from files: copy or mount them" if is_remote(path) else ""
        raise InputError(f"{path}: the shard cannot be read: {error.strerror or error}{way_out}") from error


def _check_end(tar: tarfile.TarFile) -> None:
    """tarfile takes a damaged or cut header for the end of the archive; the end is zeros, or nothing."""
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise tarfile.ReadError(f"damaged or cut off at byte {tar.offset}")


def _found(path: str) -> str | None:
    """What the file seems to be instead of a tar."""
    with open(path, "rb") as file:
        start = file.read(64)
    if not start:
        return "the file is empty"
    return next(
        (meaning for signature, meaning in FORMATS.items() if start.startswith(signature)),
        None,
    )


def _distinct(path: str, group: Iterator[Member]) -> Iterator[Member]:
    seen = set()
    for member in group:
        if member.ending in seen:
            raise InputError(f"{path}: two members are named {member.key}.{member.ending}: one sample cannot hold both")
        seen.add(member.ending)
        yield member


def _places(places: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    return np.array(places, dtype=np.int64).reshape(-1, 2)


def _nothing_usable(
    shards: Sequence[ShardIndex],
    image_endings: Sequence[str],
    text_ending: str,
    meaning: Meaning,
) -> str:
    found: Counter[str] = sum((Counter(shard.endings) for shard in shards), Counter())
    listed = ", ".join(f".{ending} ({count})" for ending, count in found.most_common(12)) or "no file at all"
    return (
        f"{shards[0].path}{f' and {len(shards) - 1} more shards' if len(shards) > 1 else ''}: no usable sample. Found {listed}; "
        f"a sample needs one of {', '.join('.' + ending for ending in image_endings)} and a .{text_ending}. Set {KEYS_OF_JOB[meaning]}"
    )
