"""Parquet and Arrow tables as a source: images as bytes, paths or URLs in a column, in row groups.

A row group is the unit of order, as a shard is. Columns are named by paths into their values, as
`data.caption_key` has them for JSON: "captions[*]", "meta.title".
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from itertools import count, repeat
from operator import attrgetter
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.config import Data, is_remote
from trainer.config.caption_key import Path, column_path, one_column_path
from trainer.config.caption_template import Template, field_path, parse_template
from trainer.config.filters import parse_filter, rules_of
from trainer.config.formats import column_meant
from trainer.data.arena import Arena
from trainer.data.bad_samples import WHOLE, Allowed, NothingUsable
from trainer.data.block_cache import cache_of
from trainer.data.blocks import Block, BlockReader
from trainer.data.captions import Captions, bad_captions, captions_in, field_value
from trainer.data.entry import Content, Entry
from trainer.data.files import persistent_each
from trainer.data.formats import Progress
from trainer.data.groups import NO_GROUP, number_at
from trainer.data.image_cells import drive_advice, image_bytes, image_cell, named_image
from trainer.data.index import THREADS, Index, raise_all
from trainer.data.indexed import NAMED_IN_ALL, filtered_of, index_in_memory, left_out_of
from trainer.data.order import epoch_samples
from trainer.data.recent import Recent
from trainer.data.row_groups import (
    DamagedTable,
    GroupReader,
    Groups,
    HeldGroup,
    cells_of,
    groups_in,
    open_groups,
    readable,
    row_of,
    too_large,
)
from trainer.data.sample import (
    MOST_BYTES,
    BadSample,
    ByImage,
    LeftOut,
    Numbering,
    RawSample,
    Source,
    all_filtered,
)
from trainer.data.sample_counts import shard_weights
from trainer.data.sample_filter import NO_SIZE, failed_filter, fields_of, size_of
from trainer.data.scores import Scores, scores_of
from trainer.data.shard_names import expand_shards
from trainer.errors import InputError
from trainer.text.wording import many

NAMED = 20
"""Number of unusable rows of a file whose numbers are kept."""
MAPPED_FILES = 256
"""Number of files whose kept rows a process keeps mapped."""
MAPPED_BATCHES = 1024
"""Number of decoded batches of rows that a loader process keeps mapped."""
_batch_numbers = count()


class Columns(NamedTuple):
    """Places of images and captions in the rows of a table."""

    image: Path
    captions: tuple[Path, ...]
    templates: tuple[Template, ...] = ()
    """Captions made of several fields, instead of `captions`."""
    group: Path = ()
    """Place of the id of a row's group; empty if no groups are asked for."""
    empty: tuple[str, ...] = ()
    """Texts that count as no caption."""

    @classmethod
    def by(cls, data: Data) -> "Columns":
        """Returns the places that the job names. Raises InputError for a name that is no path."""
        try:
            return cls(
                one_column_path("data.image_column", data.image_column),
                tuple(column_path("data.caption_column", name) for name in data.caption_column),
                tuple(map(parse_template, data.caption_template)),
                one_column_path("data.group_by", data.group_by) if data.group_by is not None else (),
                data.empty_captions,
            )
        except ValueError as error:  # a job's retrieval set may be of another format than its training data
            raise InputError(str(error)) from None

    @property
    def of_captions(self) -> list[str]:
        """Names of the columns that hold captions."""
        fields = [part.field for template in self.templates for part in template if part.field is not None]
        paths = [field_path(name) for name in fields] if self.templates else self.captions
        return list(dict.fromkeys(str(path[0]) for path in paths))

    @property
    def names(self) -> list[str]:
        """Names of the columns that hold images, captions or ids of groups."""
        return list(dict.fromkeys([str(self.image[0]), *self.of_captions, *map(str, self.group[:1])]))


class RowSelection(NamedTuple):
    """Says which rows of a table an index has."""

    form: str
    """Value of data.format."""
    columns: tuple[str, ...]
    """Columns that a row needs."""
    image: Path
    filters: tuple[str, ...] = ()
    scores: Scores | None = None
    """Tables with values that the filters compare."""

    @property
    def filter_columns(self) -> list[str]:
        """Columns that the filters read."""
        measured = any(parse_filter(text).measures for text in self.filters)
        paths = [*[self.image] * measured, *self.places.values()]
        return list(dict.fromkeys(str(path[0]) for path in paths))

    @property
    def places(self) -> dict[str, Path]:
        """Places of the fields that the filters compare, by name."""
        by = self.scores and self.scores.by
        names = fields_of(list(map(parse_filter, self.filters)), by)
        return {
            name: one_column_path(f"data.{'scores_by' if name == by else 'filters'}", name) for name in names
        }

    @property
    def identity(self) -> tuple[object, ...]:
        """Values by which an index knows it."""
        own = (*tuple(self)[:-1], *rules_of(self.filters))
        return own if self.scores is None else (*own, self.scores.identity, self.scores.by, self.scores.depth)

    def scan(self, file: BinaryIO, path: str) -> Content:
        """Returns the rows that fulfil the filters.

        Raises InputError for a malformed file and for a missing column; the message lists the columns.
        """
        groups = groups_in(file, path, self.form)
        check_columns(path, groups, [*self.columns, *self.filter_columns])
        if not self.filters:
            return _content([], groups.sizes)
        with readable(path):
            return _kept(groups, path, self)


def row_selection(data: Data) -> RowSelection:
    """Returns the columns of tables that the job reads, and its filters: one of READERS."""
    columns = Columns.by(data)
    return RowSelection(data.kind, tuple(columns.names), columns.image, data.filters, scores_of(data))


def _content(
    rows: Sequence[int],
    groups: Sequence[int],
    left_out: Mapping[str, int] | None = None,
    filtered: Mapping[str, int] | None = None,
    flaws: Sequence[tuple[str, str]] = (),
) -> Content:
    """Returns what a table holds.

    `rows` are those that the filters keep, each by its number within its group, none if there are no filters;
    `groups` is the number of rows that each group keeps.
    """
    entry = Entry(
        0,
        "",
        sum(groups),
        "",
        dict(left_out or {}),
        {},
        flaws,
        filtered=dict(filtered or {}),
        groups=list(groups),
    )
    return Content(entry, [np.array(rows, dtype=np.uint32).tobytes()])


def _kept(groups: Groups, path: str, selection: RowSelection) -> Content:
    """Judges every row by the filters."""
    filters, columns = list(map(parse_filter, selection.filters)), selection.filter_columns
    places = selection.places
    scores = selection.scores and selection.scores.of_shard(path)
    rows: list[int] = []
    counts: list[int] = []
    filtered: Counter[str] = Counter()
    flaws: list[tuple[str, str]] = []
    for group in range(len(groups.sizes)):
        before = len(rows)
        every = cells_of(groups, group, columns) if columns else repeat({}, groups.sizes[group])
        for row, cells in enumerate(every):
            key = row_key(group, row)
            try:
                size = partial(_size, cells, selection.image, path, key)
                failed = failed_filter(filters, scores, key, size, partial(_field, cells, places))
            except (ValueError, BadSample) as error:
                flaws.append((key, error.cause if isinstance(error, BadSample) else str(error)))
                continue
            if failed is None:
                rows.append(row)
            else:
                filtered[failed] += 1
        counts.append(len(rows) - before)
    left_out = Counter(cause for _, cause in flaws)
    return _content(rows, counts, left_out, filtered, flaws[:NAMED])


def _size(cells: Mapping[str, Any], image: Path, path: str, key: str) -> tuple[int, int]:
    if (size := size_of(_image(cells, image, path, key, MOST_BYTES))) is None:
        raise ValueError(NO_SIZE)
    return size


def _field(cells: Mapping[str, Any], places: Mapping[str, Path], name: str) -> object:
    try:
        return field_value(cells, places[name])
    except ValueError:
        raise ValueError(f"no field {name}, which data.filters need") from None


def check_columns(path: str, groups: Groups, names: Sequence[str]) -> None:
    """Raises InputError if the table lacks a column; the message lists those that it has."""
    for name in names:
        if name not in groups.columns:
            near = column_meant(name, groups.columns)
            hint = f"; did you mean {near!r}?" if near else "."
            raise InputError(
                f"{path}: there is no column {name!r}{hint} Its columns are: "
                f"{', '.join(map(repr, groups.columns)) or 'none'}"
            )
        if groups.columns.count(name) > 1:
            raise InputError(f"{path}: it has the column {name!r} more than once: rename the others")


def row_key(group: int, row: int) -> str:
    """Returns the name of a row in messages and records."""
    return f"{group}:{row}"


class ColumnarSource:
    """Source of the rows of several tables; each row group is a shard."""

    def __init__(
        self, index: Index, selection: RowSelection, columns: Columns, most_bytes: int, cache_bytes: int
    ) -> None:
        self.index, self._selection, self._columns = index, selection, columns
        self._most_bytes = most_bytes
        self.units = [len(entry.groups) for entry in index.entries]
        """Number of row groups of each file."""
        self._last_units = np.cumsum(np.asarray(self.units, dtype=np.int64))
        self._numbering = Numbering(self.shard_sizes())
        self.reader = BlockReader(index)
        self._groups = GroupReader(selection.form, columns.names, cache_bytes, self.reader)
        self._held: Recent[tuple[str, int], HeldGroup] = Recent(cache_bytes, attrgetter("size"))
        self._rows: Recent[int, tuple[NDArray[np.int64], NDArray[np.uint32]]] = Recent(MAPPED_FILES)

    @cached_property
    def left_out(self) -> LeftOut:
        return left_out_of(self.index)

    def __len__(self) -> int:
        return self._numbering.samples

    def shard_sizes(self) -> list[int]:
        return [rows for entry in self.index.entries for rows in entry.groups]

    def read(self, index: int) -> RawSample:
        return self._sample(*self._cells(index))

    def _sample(self, path: str, key: str, cells: Mapping[str, Any]) -> RawSample:
        image = _image(cells, self._columns.image, path, key, self._most_bytes)
        texts, counts = captions_at(cells, self._columns, path, key)
        group = _group(cells, self._columns.group, path, key)
        return RawSample(key, path, image, texts, caption_counts=counts, group=group)

    def captions(self, index: int) -> Captions:
        """Returns the captions of one sample. Raises BadSample."""
        path, key, cells = self._cells(index)
        return captions_at(cells, self._columns, path, key)

    def _cells(self, index: int) -> tuple[str, str, dict[str, Any]]:
        """Returns the file, the key and the cells of a sample. Raises BadSample in a damaged row group."""
        path, group, rows = self.rows(index, 1)
        key = row_key(group, int(rows[0]))
        try:
            held = self._held.get((path, group), lambda: self._groups.held(path, group))
            return path, key, held.row(int(rows[0]))
        except DamagedTable as error:
            raise _damaged(path, key, str(error)) from error

    def rows(self, first: int, count: int) -> tuple[str, int, NDArray[np.int64]]:
        """Returns the file and the row group of consecutive samples of one group, and their rows in it."""
        unit, row = self._numbering.locate(first)
        number = int(np.searchsorted(self._last_units, unit, side="right"))
        group = unit - int(self._last_units[number]) + self.units[number]
        rows = np.arange(row, row + count)
        if self._selection.filters:
            firsts, kept = self._rows.get(number, lambda: self._kept_rows(number))
            rows = kept[int(firsts[group]) + rows].astype(np.int64)
        return self.index.paths[number], group, rows

    def _kept_rows(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Returns the place of each group's first row among the kept ones, and the kept rows of a file."""
        counts = np.asarray(self.index.entries[number].groups, dtype=np.int64)
        return np.cumsum(counts) - counts, np.frombuffer(self.index.payload(number), dtype=np.uint32)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "left_out"}


class RowPlace(NamedTuple):
    """Place of a row that a rank has decoded for its loader processes."""

    path: str
    key: str
    at: int = 0
    size: int = 0
    """Place in the arena, and bytes, of a stream of Arrow with one batch."""
    row: int = 0
    """Row of the batch."""
    batch: int = 0
    """Number of the batch, since places are used again."""
    damage: str = ""
    """Reason why the row group cannot be decoded, if it cannot."""


class ParquetSource(ColumnarSource):
    """Source of the rows of Parquet files.

    Threads of a rank read and decode each row group once, and its loader processes take rows out of that.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._batches: Recent[int, Any] = Recent(MAPPED_BATCHES)
        self.keep_bytes = self._groups.limit_bytes

    def block_of(self, first: int, count: int) -> tuple[int, int]:
        """Returns the samples of their row group, which is decoded as a whole."""
        unit, row = self._numbering.locate(first)
        return first - row, self._numbering.size(unit)

    def read_block(self, first: int, samples: int, arena: Arena) -> Block:
        """Decodes samples of one row group into the arena. Raises as `GroupReader.batches` does."""
        path, group, rows = self.rows(first, samples)
        keys = [row_key(group, row) for row in rows.tolist()]
        places, ranges, end = list[RowPlace](), [], 0
        try:
            for batch, _ in self._groups.batches(path, group):
                begin, end = end, end + batch.num_rows
                wanted = rows[(begin <= rows) & (rows < end)] - begin
                if not len(wanted):
                    continue
                content = _stream(batch if len(wanted) == batch.num_rows else batch.take(wanted))
                kept, number = arena.put(memoryview(content)), next(_batch_numbers)
                ranges.append(kept)
                places += [
                    RowPlace(path, key, kept.place, len(content), row, number)
                    for row, key in enumerate(keys[len(places) : len(places) + len(wanted)])
                ]
        except DamagedTable as error:
            for kept in ranges:
                arena.free(kept)
            return Block([RowPlace(path, key, damage=str(error)) for key in keys], [], 0)
        return Block(places, ranges, sum(kept.size for kept in ranges))

    def read_at(self, place: RowPlace, arena: Arena) -> RawSample:
        """Returns the sample at a place. Raises as `read` does."""
        if place.damage:
            raise _damaged(place.path, place.key, place.damage)
        batch = self._batches.get(place.batch, lambda: _batch_of(arena.mapped(place.at, place.size)))
        return self._sample(place.path, place.key, row_of(batch, place.row))


def _stream(batch: Any) -> Any:
    """Returns a batch as a stream of Arrow, pyarrow.Buffer, which is read without a copy."""
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as out:
        out.write_batch(batch)
    return sink.getvalue()


def _batch_of(stream: Any) -> Any:
    import pyarrow

    return pyarrow.ipc.open_stream(pyarrow.py_buffer(stream)).read_next_batch()


def _damaged(path: str, key: str, damage: str) -> BadSample:
    return BadSample(path, key, "damaged row group", damage)


def open_columnar(index: Index, data: Data, allowed: Allowed = WHOLE) -> ColumnarSource:
    """Returns the rows of tables that are indexed: one of READERS.

    Raises InputError if more is wrong than allowed, or if no row is left.
    """
    cache_bytes = data.row_group_cache_mb * 2**20
    selection, columns = row_selection(data), Columns.by(data)
    # Arrow files are mapped, so that all processes of a node share them as they are.
    kind = ParquetSource if selection.form == "parquet" else ColumnarSource
    source = kind(index, selection, columns, data.max_member_bytes, cache_bytes)
    source.reader.cache = cache_of(data)
    if not len(source):
        filtered = filtered_of(index)
        raise NothingUsable(
            all_filtered(index.paths[0], filtered)
            if filtered
            else f"{index.paths[0]}: the tables have no rows",
            source.left_out,
        )
    allowed.check(source.left_out, len(source))
    return source


def _image(cells: Mapping[str, Any], place: Path, path: str, key: str, most_bytes: int) -> bytes:
    """Returns the image of a row. Raises BadSample."""
    return image_bytes(image_cell(cells, place), path, key, most_bytes)


def captions_at(cells: Mapping[str, Any], columns: Columns, path: str, key: str) -> Captions:
    """Returns the captions of a row. Raises BadSample."""
    try:
        return captions_in(cells, columns.captions, columns.templates, columns.empty)
    except ValueError as error:
        raise bad_captions(path, key, error) from error


def _group(cells: Mapping[str, Any], place: Path, path: str, key: str) -> int:
    """Returns the number of the row's group. Raises BadSample."""
    try:
        return number_at(cells, place) if place else NO_GROUP
    except ValueError as error:
        raise BadSample(path, key, "bad group", str(error)) from error


def row_groups_by_image(data: Data, progress: Progress | None = None) -> Source:
    """Returns the images of tables, each once, with the captions of all rows that name it by path or URL."""
    index = index_in_memory(expand_shards(data.train), row_selection(data), progress)
    allowed = Allowed.by(data)
    source = open_columnar(index, data, allowed)
    rows: dict[object, list[int]] = {}
    bad: list[BadSample] = []
    for number, (name, flaw) in enumerate(zip(_image_names(data), _flaws_of_captions(data), strict=True)):
        if name is not None and flaw is not None:  # the image may have captions in other rows
            bad.append(flaw)
        else:
            rows.setdefault(number if name is None else name, []).append(number)
    if len(rows) == len(source):
        return source
    of_index = source.left_out
    counts = Counter(of_index.by_cause) + Counter(sample.cause for sample in bad)
    left_out = LeftOut(counts, [*of_index.named, *bad][:NAMED_IN_ALL], of_index.filtered)
    by_image = ByImage(source, list(rows.values()), left_out)
    allowed.check(by_image.left_out, len(by_image))
    if not len(by_image):
        raise InputError(f"{bad[0]}: no row can be used")
    return by_image


def check_row_groups(files: Sequence[str], data: Data) -> int | None:
    """Returns the number of samples of an epoch; None with filters, which are decided at the start.

    Raises InputError, which lists what is malformed or missing, and row groups that memory does not hold.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        found = persistent_each(files, lambda file: _checked(file, data), pool)
    raise_all([result for result in found if isinstance(result, InputError)])
    tables = [result for result in found if not isinstance(result, InputError)]
    if problems := [problem for _, of_table in tables for problem in of_table]:
        raise InputError("\n".join(problems))
    if data.filters:
        return None
    sizes = [rows for of_table, _ in tables for rows in of_table]
    return epoch_samples(sizes, shard_weights(data, [len(of_table) for of_table, _ in tables]))


def _checked(file: str, data: Data) -> tuple[Sequence[int], list[str]]:
    """Returns the rows of each row group of a table, and what is wrong with it.

    Raises InputError if it is malformed or lacks a column.
    """
    selection, most = row_selection(data), data.row_group_cache_mb * 2**20
    with open_groups(file, data.kind) as groups:
        check_columns(file, groups, [*selection.columns, *selection.filter_columns])
        unpacked = (groups.unpacked_bytes(group, selection.columns) for group in range(len(groups.sizes)))
        problems = [too_large(file, group, most) for group, size in enumerate(unpacked) if size > most]
        problems += _missing_images(file, groups, selection)
    return groups.sizes, problems


def captions_of_groups(file: str, data: Data) -> Iterator[str]:
    """Yields the captions of a table's rows, of which it reads no image: `captions` of READERS."""
    columns = Columns.by(data)
    for _, cells in _rows_of(file, data, columns.of_captions):
        with suppress(BadSample):
            yield from captions_at(cells, columns, file, "").texts


def _flaws_of_captions(data: Data) -> Iterator[BadSample | None]:
    """Yields for each row what is wrong with its captions; None if nothing is."""
    columns = Columns.by(data)
    for file in expand_shards(data.train):
        for key, cells in _rows_of(file, data, columns.of_captions):
            try:
                captions_at(cells, columns, file, key)
            except BadSample as flaw:
                yield flaw
            else:
                yield None


def numbers_of_groups(file: str, data: Data) -> Iterator[int]:
    """Yields the number of the group that data.group_by puts each row in: `groups` of READERS."""
    place = Columns.by(data).group
    for _, cells in _rows_of(file, data, list(map(str, place[:1]))):
        with suppress(ValueError):
            yield number_at(cells, place)


def _rows_of(file: str, data: Data, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    with open_groups(file, data.kind) as groups:
        for group in range(len(groups.sizes)):
            for row, cells in enumerate(cells_of(groups, group, names)):
                yield row_key(group, row), cells


def _missing_images(file: str, groups: Groups, selection: RowSelection) -> Iterator[str]:
    """Yields what is wrong if image files that a table names do not exist."""
    rows = [
        (number, name)
        for number, name in enumerate(_names_in(groups, file, selection))
        if name is not None and not is_remote(name) and not os.path.isfile(name)
    ]
    if rows:
        yield (
            f"{file}: {len(rows):,} of {many(sum(groups.sizes), 'image file')} are missing; the first is "
            f"{rows[0][1]} in row {rows[0][0] + 1} (relative paths start at the table's folder)"
            f"{drive_advice(os.path.relpath(name, os.path.dirname(file)) for _, name in rows)}"
        )


def _image_names(data: Data) -> Iterator[str | None]:
    """Yields for each row the path or the URL of its image; None for an image that the table holds."""
    selection = row_selection(data)
    for file in expand_shards(data.train):
        with open_groups(file, data.kind) as groups:
            yield from _names_in(groups, file, selection)


def _names_in(groups: Groups, file: str, selection: RowSelection) -> Iterator[str | None]:
    for group, size in enumerate(groups.sizes):
        if not (columns := groups.naming(group, selection.image)):
            yield from repeat(None, size)
            continue
        for row, cells in enumerate(cells_of(groups, group, columns)):
            image = image_cell(cells, selection.image)
            if isinstance(image, bytes):  # a group holds images or names them, but for rows without any
                yield from repeat(None, size - row)
                break
            yield named_image(image, file)
