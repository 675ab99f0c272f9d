"""Parquet and Arrow tables as a source: images as bytes, paths or URLs in a column, in row groups. No torch.

A row group is the unit of order, as a shard is. Columns are named by paths into their values, as
`data.caption_key` has them for JSON: "captions[*]", "meta.title".
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.config import Data
from trainer.config.caption_key import Path, column_path, one_column_path
from trainer.config.caption_template import Template, field_path, parse_template
from trainer.config.filters import MEASURES, Filter, parse_filter
from trainer.data.bad_samples import WHOLE, Allowed
from trainer.data.captions import Captions, captions_in, field_value
from trainer.data.image_cells import image_bytes, image_cell
from trainer.data.indexed import FileIndex, filtered_of, left_out_of
from trainer.data.row_groups import DamagedTable, GroupCache, Groups, cells_of, groups_in, readable
from trainer.data.sample import MOST_BYTES, BadSample, LeftOut, Numbering, RawSample, all_filtered
from trainer.data.sample_filter import size_of
from trainer.errors import InputError

NAMED = 20
"""Number of unusable rows of a file whose numbers are kept."""
MAPPED_FILES = 256
"""Number of files whose kept rows a process keeps mapped."""


class Columns(NamedTuple):
    """Places of images and captions in the rows of a table."""

    image: Path
    captions: tuple[Path, ...]
    templates: tuple[Template, ...] = ()
    """Captions made of several fields, instead of `captions`."""

    @classmethod
    def by(cls, data: Data) -> "Columns":
        """Returns the places that the job names. Raises InputError for a name that is no path."""
        try:
            return cls(
                one_column_path("data.image_column", data.image_column),
                tuple(column_path("data.caption_column", name) for name in data.caption_column),
                tuple(map(parse_template, data.caption_template)),
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
        """Names of the columns that hold images or captions."""
        return list(dict.fromkeys([str(self.image[0]), *self.of_captions]))


class RowSelection(NamedTuple):
    """Says which rows of a table an index has."""

    form: str
    """Value of data.format."""
    columns: tuple[str, ...]
    """Columns that a row needs."""
    image: Path
    filters: tuple[str, ...] = ()

    def with_all_rows(self) -> "RowSelection":
        """Returns the selection without filters; the columns that these read must exist."""
        columns = tuple(dict.fromkeys([*self.columns, *self.filter_columns]))
        return self._replace(columns=columns, filters=())

    @property
    def filter_columns(self) -> list[str]:
        """Columns that the filters read."""
        conditions = map(parse_filter, self.filters)
        paths = [
            self.image if each.measures else one_column_path("data.filters", each.name) for each in conditions
        ]
        return list(dict.fromkeys(str(path[0]) for path in paths))

    @property
    def identity(self) -> tuple[object, ...]:
        """Values by which an index knows it."""
        return tuple(self)

    def scan(self, file: BinaryIO, path: str) -> "RowsKept":
        """Returns the rows that fulfil the filters.

        Raises InputError for a malformed file and for a missing column; the message lists the columns.
        """
        groups = groups_in(file, path, self.form)
        check_columns(path, groups, [*self.columns, *self.filter_columns])
        if not self.filters:
            return RowsKept(np.empty(0, dtype=np.uint32), groups.sizes)
        with readable(path):
            return _kept(groups, path, self)


def row_selection(data: Data) -> RowSelection:
    """Returns the columns of tables that the job reads, and its filters: one of READERS."""
    columns = Columns.by(data)
    return RowSelection(data.kind, tuple(columns.names), columns.image, data.filters)


@dataclass(frozen=True)
class RowsKept:
    """The part of an index that comes from one table."""

    rows: NDArray[np.uint32]
    """Rows that the filters keep, each by its number within its group; empty if there are no filters."""
    groups: Sequence[int]
    """Number of rows that each group keeps."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    filtered: Mapping[str, int] = field(default_factory=dict)
    flaws: Sequence[tuple[str, str]] = ()
    """Keys and causes of the first rows that cannot be judged."""
    endings: Mapping[str, int] = field(default_factory=dict)
    damage: str = ""
    lost: int = 0

    @property
    def payload(self) -> list[bytes]:
        """The rows as an index stores them."""
        return [self.rows.tobytes()]

    def __len__(self) -> int:
        return sum(self.groups)


def _kept(groups: Groups, path: str, selection: RowSelection) -> RowsKept:
    """Judges every row by the filters."""
    conditions = [
        (each, one_column_path("data.filters", each.name)) for each in map(parse_filter, selection.filters)
    ]
    columns = selection.filter_columns
    rows: list[int] = []
    counts: list[int] = []
    filtered: Counter[str] = Counter()
    flaws: list[tuple[str, str]] = []
    for group in range(len(groups.sizes)):
        before = len(rows)
        for row, cells in enumerate(cells_of(groups, group, columns)):
            key = row_key(group, row)
            try:
                failed = _failed(cells, conditions, selection.image, path, key)
            except (ValueError, BadSample) as error:
                flaws.append((key, error.cause if isinstance(error, BadSample) else str(error)))
                continue
            if failed is None:
                rows.append(row)
            else:
                filtered[failed] += 1
        counts.append(len(rows) - before)
    left_out = Counter(cause for _, cause in flaws)
    return RowsKept(np.array(rows, dtype=np.uint32), counts, left_out, filtered, flaws[:NAMED])


def _failed(
    cells: Mapping[str, Any],
    conditions: Sequence[tuple[Filter, Path]],
    image: Path,
    path: str,
    key: str,
) -> str | None:
    """Returns the first filter that a row fails. Raises ValueError, in words that many rows share."""
    size: tuple[int, int] | None = None
    for condition, place in conditions:
        if condition.measures:
            size = size or size_of(_image(cells, image, path, key, MOST_BYTES))
            if size is None:
                raise ValueError("the image's header, which data.filters need, cannot be read")
            found: object = float(MEASURES[condition.name](*size))
        else:
            try:
                found = field_value(cells, place)
            except ValueError:
                raise ValueError(f"no field {condition.name}, which data.filters need") from None
        if not condition.holds(found):
            return condition.text
    return None


def check_columns(path: str, groups: Groups, names: Sequence[str]) -> None:
    """Raises InputError if the table lacks a column; the message lists those that it has."""
    for name in names:
        if name not in groups.columns:
            near = get_close_matches(name, groups.columns, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
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
        self, index: FileIndex, selection: RowSelection, columns: Columns, most_bytes: int, cache_bytes: int
    ) -> None:
        self.index, self._selection, self._columns = index, selection, columns
        self._most_bytes = most_bytes
        self.units = [len(entry.groups) for entry in index.entries]
        """Number of row groups of each file."""
        self._last_units = np.cumsum(np.asarray(self.units, dtype=np.int64))
        self._numbering = Numbering(self.shard_sizes())
        self._cache = GroupCache(selection.form, columns.names, cache_bytes)
        self._rows: OrderedDict[int, tuple[NDArray[np.int64], NDArray[np.uint32]]] = OrderedDict()

    @cached_property
    def left_out(self) -> LeftOut:
        return left_out_of(self.index)

    def __len__(self) -> int:
        return self._numbering.samples

    def shard_sizes(self) -> list[int]:
        return [rows for entry in self.index.entries for rows in entry.groups]

    def read(self, index: int) -> RawSample:
        path, key, cells = self._cells(index)
        image = _image(cells, self._columns.image, path, key, self._most_bytes)
        captions = _captions(cells, self._columns, path, key)
        return RawSample(key, path, image, captions.texts, caption_counts=captions.counts)

    def captions(self, index: int) -> Captions:
        """Returns the captions of one sample. Raises BadSample."""
        path, key, cells = self._cells(index)
        return _captions(cells, self._columns, path, key)

    def _cells(self, index: int) -> tuple[str, str, dict[str, Any]]:
        """Returns the file, the key and the cells of a sample. Raises BadSample in a damaged row group."""
        path, group, row = self.place(index)
        key = row_key(group, row)
        try:
            return path, key, self._cache.row(path, group, row)
        except DamagedTable as error:
            raise BadSample(path, key, "damaged row group", str(error)) from error

    def place(self, index: int) -> tuple[str, int, int]:
        """Returns the file, the row group and the row in it of a sample."""
        unit, row = self._numbering.locate(index)
        number = int(np.searchsorted(self._last_units, unit, side="right"))
        group = unit - int(self._last_units[number]) + self.units[number]
        if self._selection.filters:
            firsts, rows = self._kept_rows(number)
            row = int(rows[int(firsts[group]) + row])
        return self.index.paths[number], group, row

    def _kept_rows(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Returns the place of each group's first row among the kept ones, and the kept rows of a file."""
        if number not in self._rows:
            counts = np.asarray(self.index.entries[number].groups, dtype=np.int64)
            rows = np.frombuffer(self.index.payload(number), dtype=np.uint32)
            self._rows[number] = np.cumsum(counts) - counts, rows
            if len(self._rows) > MAPPED_FILES:
                self._rows.popitem(last=False)
        self._rows.move_to_end(number)
        return self._rows[number]

    def __getstate__(self) -> dict[str, object]:
        kept = {name: value for name, value in self.__dict__.items() if name != "left_out"}
        return {**kept, "_rows": OrderedDict()}


def open_columnar(index: FileIndex, data: Data, allowed: Allowed = WHOLE) -> ColumnarSource:
    """Returns the rows of tables that are indexed: one of READERS.

    Raises InputError if more is wrong than allowed, or if no row is left.
    """
    cache_bytes = data.row_group_cache_mb * 2**20
    source = ColumnarSource(index, row_selection(data), Columns.by(data), data.max_member_bytes, cache_bytes)
    if not len(source):
        filtered = filtered_of(index)
        raise InputError(
            all_filtered(index.paths[0], filtered)
            if filtered
            else f"{index.paths[0]}: the tables have no rows"
        )
    allowed.check(source.left_out, len(source))
    return source


def _image(cells: Mapping[str, Any], place: Path, path: str, key: str, most_bytes: int) -> bytes:
    """Returns the image of a row. Raises BadSample."""
    return image_bytes(image_cell(cells, place), path, key, most_bytes)


def _captions(cells: Mapping[str, Any], columns: Columns, path: str, key: str) -> Captions:
    """Returns the captions of a row. Raises BadSample."""
    try:
        return captions_in(cells, columns.captions, columns.templates)
    except ValueError as error:
        raise BadSample(path, key, "bad captions", str(error)) from error
