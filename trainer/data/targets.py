"""`model.targets`: features that teachers have stored of the training samples, read beside them. No torch.

A folder has a file for each shard, as `clipship embed` writes them. Where blocks are read ahead, their
features are read with them and lie in the same memory; elsewhere a loader process reads the row group in
which a sample's row is, and keeps the last ones. Rows belong to samples by their keys: filters may leave
samples out. They are looked for where the sample would be without filters, then behind that.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from trainer.config import Job
from trainer.config.losses import LOSSES, NO_BIAS
from trainer.data.arena import Arena
from trainer.data.block_cache import cache_of
from trainer.data.blocks import Block, BlockReader, InBlocks
from trainer.data.entry import Entry
from trainer.data.feature_files import (
    KEY,
    About,
    Vectors,
    feature_files,
    files_in,
    folder_named,
    key_text,
    read_about,
    read_by,
    values_in,
)
from trainer.data.files import Stamp
from trainer.data.index import THREADS, Index, raise_all, versions_of
from trainer.data.indexed import Indexed
from trainer.data.recent import Recent
from trainer.data.row_groups import OPEN_FILES, GroupReader, ParquetGroups, readable
from trainer.data.sample import BadSample, LeftOut, Numbering, RawSample, Source
from trainer.data.shard_names import expand_shards
from trainer.errors import InputError
from trainer.sysinfo.extras import require
from trainer.text.wording import many

MOST_BYTES = 2**27
"""Memory of a process for row groups that it has read last."""
_KEY = "model.targets"
_LARGEST_GROUP = 2**31
_COLUMNS = (KEY, "row", "image", "text", "problem")
_CAUSE = "no stored target"
_TWICE = "its key comes twice"
_UNSEEN = Entry(0, "", 0, "", {}, {})


class StoredTeacher(NamedTuple):
    """A teacher, as the files of a folder describe it."""

    folder: str
    model: str
    made_by: str
    width: int
    logit_scale: float
    logit_bias: float | None
    views: int

    def __str__(self) -> str:
        seen = "the pictures that training draws from" if self.views else "whole pictures, not their crops"
        return f"{self.model}, in {self.folder}: it has seen {seen}"


def stored_teachers(
    job: Job, versions: Mapping[str, Stamp], first: int = 0, step: int = 1
) -> list[list[StoredTeacher]]:
    """Returns the teachers of each folder of `model.targets`, by the files of every `step`-th shard.

    Raises InputError for files that are missing, or that are not those of the shards and of the job.
    """
    require("pyarrow")
    found = []
    for pattern in job.model.targets:
        if not (folder := folder_named(pattern)):
            made = "`clipship embed TEACHER SHARDS --out FOLDER` makes one"
            raise InputError(f"{_KEY}: {pattern} is no folder: {made}")
        files = files_in(folder, list(versions), _KEY)[first::step]
        with ThreadPoolExecutor(THREADS) as pool:
            abouts = list(pool.map(read_about, files))
        rows = zip(files, list(versions.items())[first::step], abouts, strict=True)
        problems = [problem for file, shard, about in rows if (problem := _problem(file, shard, about, job))]
        raise_all([InputError(f"{_KEY}: {problem}") for problem in problems])
        facts = attrgetter(*StoredTeacher._fields[1:])
        found.append(list(dict.fromkeys(StoredTeacher(folder, *facts(about)) for about in abouts)))
    return found


def one_each(of_folders: Sequence[Sequence[StoredTeacher]]) -> list[StoredTeacher]:
    """Returns the teacher of each folder. Raises InputError if one has several, or if their views differ."""
    for teachers in of_folders:
        if others := [teacher for teacher in teachers if teacher != teachers[0]]:
            raise InputError(
                f"{_KEY}: {others[0].folder} holds features of several models ({teachers[0].model}; "
                f"{others[0].model}): write all with one"
            )
    found = [teachers[0] for teachers in of_folders]
    if other := next((teacher for teacher in found if teacher.views != found[0].views), None):
        raise InputError(
            f"{_KEY}: {found[0].folder} has {many(found[0].views, 'view')} of a picture and {other.folder} "
            f"{other.views:,}: store as many"
        )
    return found


def check_targets(job: Job) -> None:
    """Raises InputError for targets that are not those of the job's training data."""
    one_each(stored_teachers(job, versions_of(expand_shards(job.data.train))))


def _problem(file: str, shard: tuple[str, Stamp], about: About, job: Job) -> str:
    """Returns what is wrong with a file; "" if nothing is."""
    views = f" --views {about.views}" if about.views else ""
    again = f"{shard[0]} --out {file.rpartition('/')[0]} --of JOB{views}"
    here = read_by(job.data, job.seed, about.views)
    other = next((key for key in here if here[key] != about.read_by.get(key)), "")
    if not about.is_of(shard[1]):
        why = f"is of another version of {shard[0]}"
    elif other:
        given = f"{other} is {about.read_by.get(other)} there and {here[other]} here"
        why = f"is of other pictures or captions: {given}"
    elif LOSSES[job.optim.loss].has_bias and about.logit_bias is None:
        return f"{file} is of {about.model}, which {NO_BIAS}"
    else:
        return ""
    return f"{file} {why}. Remove it, and write it again: clipship embed TEACHER {again}"


class _Group(NamedTuple):
    """A row group in memory; the rows of a sample follow each other in one group."""

    rows: Mapping[str, range]
    """Rows of each sample, by its key."""
    problems: Sequence[str | None]
    """Why a sample has no features, by row."""
    place: NDArray[np.int64]
    """Place of each row among those that have features."""
    images: Vectors
    """[rows with features, views, D]; one view is the whole picture."""
    texts: Vectors
    """[rows with features, D]."""

    @property
    def size(self) -> int:
        return self.images.nbytes + self.texts.nbytes

    def target(self, key: str) -> Vectors | str:
        """Returns the features of a sample, as `RawSample.target` has them, or why there are none."""
        rows = self.rows[key]
        if (problem := self.problems[rows[0]]) is not None:
            return problem
        first = int(self.place[rows[0]])
        return np.concatenate([self.images[first], self.texts[first : first + len(rows)]])


class _Limits(NamedTuple):
    """The row groups of a file, as they are known before their features are read."""

    firsts: list[int]
    """The first row of each group."""
    keys: list[tuple[str, str]]
    """The first and last key of each group in the order of texts."""
    twice: frozenset[str]
    """Keys that several samples have, in different groups."""

    def candidates(self, wanted: Sequence[str], near: int, found: Mapping[str, object]) -> Iterator[int]:
        """Yields row groups that may hold what is not found yet, the likely ones first."""
        begin = max(0, bisect_right(self.firsts, near) - 1)
        for group in (*range(begin, len(self.firsts)), *range(begin)):
            low, high = self.keys[group]
            if any(low <= key <= high for key in wanted if key not in found):
                yield group


class _Features:
    """The files of one folder. Threads may call it."""

    def __init__(self, teacher: StoredTeacher, shards: Sequence[str], job: Job) -> None:
        files = feature_files(shards, teacher.folder)
        index = Index(tuple(files.values()), (_UNSEEN,) * len(files))
        self._files, self._shape = files, (max(1, teacher.views), teacher.width)
        self._reader = GroupReader("parquet", _COLUMNS, _LARGEST_GROUP, BlockReader(index))
        self._reader.blocks.cache = cache_of(job.data)
        self._groups: Recent[tuple[str, int], _Group] = Recent(MOST_BYTES, attrgetter("size"))
        self._limits: Recent[str, _Limits] = Recent(OPEN_FILES)

    def find(self, shard: str, keys: Sequence[str], near: int) -> list[Vectors | str]:
        """Returns the targets of samples of a shard, or why they have none.

        `near` is the row at which the first one is, or before it.
        """
        file, wanted = self._files[shard], [key_text(key) for key in keys]
        limits = self._limits.get(file, lambda: self._limits_of(file))
        found: dict[str, Vectors | str] = {key: _TWICE for key in wanted if key in limits.twice}
        for group in limits.candidates(wanted, near, found):
            held = self._groups.get((file, group), partial(self._read, file, group))
            found.update({key: held.target(key) for key in wanted if key in held.rows and key not in found})
        return [found.get(key, f"{file} has no row of it") for key in wanted]

    def _limits_of(self, file: str) -> "_Limits":
        import pyarrow
        import pyarrow.compute

        groups = cast(ParquetGroups, self._reader.groups(file))
        with readable(file):
            firsts, limits = [first for first, _ in groups.limits("row", int)], groups.limits(KEY, str)
        meeting = (
            group
            for group, (low, high) in enumerate(limits)
            if any(low <= to and high >= begin for begin, to in (*limits[:group], *limits[group + 1 :]))
        )
        keys: list[Any] = []
        with readable(file):
            for group in meeting:
                cells = pyarrow.Table.from_batches([batch for batch, _ in groups.read(group, (KEY, "row"))])
                keys += cells.group_by([KEY, "row"]).aggregate([])[KEY].chunks
            counted = pyarrow.chunked_array(keys, pyarrow.string()).value_counts()
            several = pyarrow.compute.greater(counted.field("counts"), 1)
            twice = counted.field("values").filter(several).to_pylist()
        return _Limits(firsts, limits, frozenset(twice))

    def _read(self, file: str, group: int) -> _Group:
        import pyarrow

        with readable(file):
            batches = [batch for batch, _ in self._reader.batches(file, group)]
            return self._group(pyarrow.Table.from_batches(batches))

    def _group(self, table: Any) -> _Group:
        """Raises ValueError and KeyError if the table is none of features."""
        keys, problems = table[KEY].to_pylist(), table["problem"].to_pylist()
        numbers = table["row"].to_numpy()
        begins = np.flatnonzero(np.r_[True, numbers[1:] != numbers[:-1]]).tolist()
        valid = np.array([problem is None for problem in problems])
        rows: dict[str, range] = {}
        for begin, end in pairwise([*begins, len(keys)]):
            if rows.setdefault(keys[begin], range(begin, end))[0] != begin:
                problems[rows[keys[begin]][0]] = _TWICE
        images = values_in(table["image"]).reshape(-1, *self._shape)
        texts = values_in(table["text"]).reshape(-1, self._shape[1])
        if not len(images) == len(texts) == valid.sum():
            raise ValueError("it has not one feature for each row without a problem")
        return _Group(rows, problems, np.cumsum(valid) - 1, images, texts)


class Targets:
    """The targets of the samples of an index, of all teachers. Threads may call it."""

    def __init__(self, job: Job, index: Index, teachers: Sequence[StoredTeacher]) -> None:
        self.teachers = tuple(teachers)
        self.views = teachers[0].views
        self._folders = [_Features(teacher, index.paths, job) for teacher in teachers]

    def find(self, shard: str, keys: Sequence[str], near: int) -> list[Vectors | str]:
        """Returns the features of samples of a shard, those of the teachers side by side, or why not."""
        of_teachers = zip(*(folder.find(shard, keys, near) for folder in self._folders), strict=True)
        return [_joined(parts) for parts in of_teachers]

    def beside(self, source: Source) -> Source:
        """Returns the source with the target of each sample; one without is a BadSample."""
        return JudgedBlocks(source, self) if isinstance(source, InBlocks) else Judged(source, self)


def _joined(parts: Sequence[Vectors | str]) -> Vectors | str:
    if lacking := next((part for part in parts if isinstance(part, str)), ""):
        return lacking
    of_teachers = [part for part in parts if not isinstance(part, str)]
    if len({len(rows) for rows in of_teachers}) > 1:
        return "its teachers have different numbers of captions"
    return np.concatenate(of_teachers, axis=1)


class Judged:
    """Source of samples with their targets."""

    def __init__(self, source: Source, targets: Targets) -> None:
        """`source` has an index."""
        self._source, self._targets = source, targets
        self._index = cast(Indexed, source).index
        self._files = Numbering([len(entry) for entry in self._index.entries])

    @property
    def left_out(self) -> LeftOut:
        return self._source.left_out

    def __len__(self) -> int:
        return len(self._source)

    def shard_sizes(self) -> list[int]:
        return self._source.shard_sizes()

    def read(self, index: int) -> RawSample:
        raw = self._source.read(index)
        return self._judged(raw, self._find(index, [raw.key])[0])

    def _find(self, first: int, keys: Sequence[str]) -> list[Vectors | str]:
        """Returns the targets of consecutive samples of one shard."""
        number, row = self._files.locate(first)
        return self._targets.find(self._index.paths[number], keys, row)

    def _judged(self, raw: RawSample, target: Vectors | str) -> RawSample:
        """Returns the sample with its target. Raises BadSample if it has none."""
        if not isinstance(target, str):
            texts = len(target) - max(1, self._targets.views)
            if texts == len(raw.captions):
                return replace(raw, target=target)
            target = f"it has {many(len(raw.captions), 'caption')}, and {many(texts, 'text feature')}"
        raise BadSample(raw.origin, raw.key, _CAUSE, f"{_KEY}: {target}")


class JudgedPlace(NamedTuple):
    """Place of a sample, and that of its target in the arena."""

    sample: Any
    at: int
    shape: tuple[int, int]
    """Rows and columns of the target."""
    dtype: str
    problem: str = ""
    """Why there is no target; "" if there is one."""


class JudgedBlocks(Judged):
    """The same of a source that is read in blocks: implements `trainer.data.blocks.InBlocks`."""

    def __init__(self, source: Any, targets: Targets) -> None:
        super().__init__(source, targets)
        self._blocks: InBlocks = source
        self.keep_bytes = self._blocks.keep_bytes

    def block_of(self, first: int, count: int) -> tuple[int, int]:
        return self._blocks.block_of(first, count)

    def read_block(self, first: int, count: int, arena: Arena) -> Block:
        block = self._blocks.read_block(first, count, arena)
        found = self._find(first, [place.key for place in block.places])
        content = [b"" if isinstance(rows, str) else rows.tobytes() for rows in found]
        kept = arena.put(b"".join(content))
        begins = accumulate(map(len, content), initial=kept.place)
        places = [_placed(*each) for each in zip(block.places, begins, found, strict=False)]
        return Block(places, [*block.ranges, kept], block.size + kept.size)

    def read_at(self, place: JudgedPlace, arena: Arena) -> RawSample:
        dtype = np.dtype(place.dtype)
        content = arena.read(place.at, math.prod(place.shape) * dtype.itemsize)
        rows: Vectors = np.frombuffer(content, dtype).reshape(place.shape)
        return self._judged(self._blocks.read_at(place.sample, arena), place.problem or rows)


def _placed(sample: Any, at: int, target: Vectors | str) -> JudgedPlace:
    if isinstance(target, str):
        return JudgedPlace(sample, at, (0, 0), "f2", target)
    return JudgedPlace(sample, at, (len(target), target.shape[1]), target.dtype.str)
