"""CSV and TSV tables of image files and captions. No torch."""

import csv
import io
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

from trainer.config import Data, is_remote
from trainer.config.caption_template import Template, filled, parse_template
from trainer.config.filters import Filter, parse_filter
from trainer.config.formats import column_meant
from trainer.data.bad_samples import Allowed
from trainer.data.captions import Captions, bad_captions, gathered
from trainer.data.files import open_at_once, read_file
from trainer.data.groups import NO_GROUP, id_number
from trainer.data.image_cells import INSIDE, drive_advice, image_bytes, is_url, local_path, named_or_inside
from trainer.data.indexed import NAMED_IN_ALL
from trainer.data.sample import (
    MOST_BYTES,
    BadSample,
    ByImage,
    LeftOut,
    Numbering,
    RawSample,
    all_filtered,
    check_file,
    kind_of_file,
)
from trainer.data.sample_counts import samples_of_an_epoch
from trainer.errors import InputError

T = TypeVar("T")
SHOWN_ROWS = 10
_QUOTES = (
    "A cell that begins with a quote must end with one, and a quote inside it is doubled; if quotes are "
    'text, set data.quotes = "text" in a job, --quotes text in a command'
)
LONGEST_CELL = 2**24


@dataclass(frozen=True)
class TableColumns:
    """Columns of a table that hold images and captions, and how its text is read."""

    image: str = "image"
    captions: tuple[str, ...] = ("caption",)
    templates: tuple[Template, ...] = ()
    """Captions made of several columns, instead of `captions`."""
    separator: str | None = None
    """Character between columns; None for a tab if the name ends in .tsv, else a comma."""
    encoding: str = "utf-8"
    quotes: str = "cells"
    """Value of data.quotes."""
    filters: tuple[Filter, ...] = ()
    """Conditions on columns that a row must fulfil."""
    group: str | None = None
    """Column with the id of a row's group."""
    empty: tuple[str, ...] = ()
    """Texts that count as no caption."""

    @classmethod
    def by(cls, data: Data) -> "TableColumns":
        """Returns the columns that the job names."""
        return cls(
            data.image_column,
            data.caption_column,
            tuple(map(parse_template, data.caption_template)),
            data.separator,
            data.encoding,
            data.quotes,
            tuple(map(parse_filter, data.filters)),
            data.group_by,
            data.empty_captions,
        )

    @property
    def caption_fields(self) -> list[str]:
        """Names of all columns that captions are made of."""
        fields = [part.field for template in self.templates for part in template if part.field is not None]
        return list(dict.fromkeys(fields or self.captions))


@dataclass(frozen=True)
class Table:
    """A table with an image and a caption in every row."""

    path: Path
    images: tuple[str, ...]
    """Paths as the table gives them; relative ones start at the table's folder."""
    captions: tuple[tuple[str, ...], ...]
    """For each entry of the columns' captions or templates, a caption for each row, or an empty text.

    Captions are in one line: any run of white space is a single space.
    """
    rows: tuple[int, ...]
    """Row numbers as a spreadsheet shows them: the header is row 1."""
    others: tuple[Mapping[str, str], ...] = ()
    """Cells of all other columns, by column, if they were asked for."""
    bad: tuple[BadSample, ...] = ()
    """Rows without an image or a caption, which are left out."""
    filtered: Mapping[str, int] = field(default_factory=dict)
    """Number of rows that a filter has left out, by filter."""
    groups: tuple[int, ...] = ()
    """Number of each row's group; none if no groups were asked for."""
    empty: tuple[str, ...] = ()
    """Texts that count as no caption."""

    def image_path(self, number: int) -> Path:
        """Returns the image file of a row, counted from 0 without the header, if its image is no URL."""
        return Path(local_path(str(self.path.parent), self.images[number]))

    def key(self, number: int) -> str:
        """Returns the name of a row's image, or the row if the table holds the picture itself."""
        name = self.images[number]
        return f"row {self.rows[number]}" if name.startswith(INSIDE) else name

    def captions_of(self, number: int) -> Captions:
        """Returns the captions of a row. Raises ValueError if it has none."""
        return gathered([[texts[number]] for texts in self.captions], self.empty)

    def origin(self, number: int) -> str:
        """Returns table and row, for messages."""
        return f"{self.path}: row {self.rows[number]}"

    def read_image(self, number: int, most_bytes: int = MOST_BYTES) -> bytes:
        """Returns the content of the image file, or of what is behind the URL.

        Raises BadSample if it is no file, too large, or not fetched, and StorageError if it stays unreadable.
        """
        path, origin, name = self.image_path(number), self.origin(number), self.images[number]
        if is_url(name):
            return image_bytes(name, str(self.path), origin, most_bytes)
        return read_file(
            path,
            f"{origin}: image {path}",
            lambda status: check_file(origin, self.images[number], status, most_bytes),
        )


class TableSource:
    """Source of the samples of several tables; images are files beside the tables."""

    def __init__(self, tables: Sequence[Table], most_bytes: int = MOST_BYTES) -> None:
        self._tables, self._most_bytes = tuple(tables), most_bytes
        self.left_out = left_out_of(tables)
        self._numbering = Numbering(self.shard_sizes())

    def __len__(self) -> int:
        return self._numbering.samples

    def shard_sizes(self) -> list[int]:
        return [len(table.rows) for table in self._tables]

    def read(self, index: int) -> RawSample:
        table_number, number = self._numbering.locate(index)
        table = self._tables[table_number]
        captions = table.captions_of(number)
        return RawSample(
            table.key(number),
            table.origin(number),
            table.read_image(number, self._most_bytes),
            captions.texts,
            caption_counts=captions.counts,
            group=table.groups[number] if table.groups else NO_GROUP,
        )

    def captions(self, index: int) -> Captions:
        """Returns the captions of one sample."""
        table, number = self._numbering.locate(index)
        return self._tables[table].captions_of(number)


def by_image(tables: Sequence[Table], most_bytes: int = MOST_BYTES) -> ByImage:
    """Gathers the tables' rows by the image file that they name, however the tables write its path.

    Images come in the order of their first rows.
    """
    source, numbers = TableSource(tables, most_bytes), count()
    rows: dict[Path | str, list[int]] = {}
    for table in tables:
        for number, name in enumerate(table.images):
            path = name if is_url(name) else Path(os.path.normpath(table.image_path(number)))
            rows.setdefault(path, []).append(next(numbers))
    return ByImage(source, list(rows.values()), source.left_out)


def left_out_of(tables: Sequence[Table]) -> LeftOut:
    """Returns the rows of all tables that are not used."""
    bad = [sample for table in tables for sample in table.bad]
    filtered = sum((Counter(table.filtered) for table in tables), Counter[str]())
    return LeftOut(Counter(sample.cause for sample in bad), bad[:NAMED_IN_ALL], filtered)


def _flaw(table: Table, place: int, columns: TableColumns) -> BadSample | None:
    """Returns what is wrong with a row."""
    if not table.images[place]:
        what = f"column {columns.image!r} is empty"
        return BadSample(table.origin(place), "(no image)", "no image", what)
    try:
        table.captions_of(place)
    except ValueError as error:
        return bad_captions(table.origin(place), table.key(place), error)
    return None


def _with_rows(table: Table, kept: Sequence[int], bad: tuple[BadSample, ...]) -> Table:
    def of(values: Sequence[T]) -> tuple[T, ...]:
        return tuple(values[place] for place in kept)

    return replace(
        table,
        images=of(table.images),
        captions=tuple(map(of, table.captions)),
        rows=of(table.rows),
        others=of(table.others) if table.others else (),
        groups=of(table.groups) if table.groups else (),
        bad=bad,
    )


def read_all_rows(path: str | Path, columns: TableColumns, keep_others: bool = False) -> Table:
    """Reads a table as `read_table` does, with the rows that lack an image or a caption."""
    return _read_cells(_path(path), columns, keep_others)


def _path(path: str | Path) -> Path:
    if is_remote(str(path)):
        raise InputError(
            f"{path}: tables of text (.csv, .tsv) are read from file systems only: write it as .parquet, "
            "which may lie at an address, or pack it into shards (`clipship pack`)"
        )
    return Path(path)


def read_table(path: str | Path, columns: TableColumns, keep_others: bool = False) -> Table:
    """Reads a table; opens no image file. Rows without an image or a caption become its `bad`.

    Raises InputError for missing columns (the message lists the columns), for text of another encoding, and
    if no row can be used.
    """
    table = read_all_rows(path, columns, keep_others)
    bad = {place: sample for place in range(len(table.rows)) if (sample := _flaw(table, place, columns))}
    kept = [place for place in range(len(table.rows)) if place not in bad]
    if not kept:
        raise InputError("\n".join(unfilled(table, columns)))
    return table if not bad else _with_rows(table, kept, tuple(bad.values()))


def _read_cells(path: Path, columns: TableColumns, keep_others: bool = False) -> Table:
    """Reads a table as `read_table` does, also one whose rows lack an image or a caption."""
    separator = columns.separator or ("\t" if path.suffix.lower() == ".tsv" else ",")
    rows = _rows(path, separator, columns)
    header = [cell.strip() for cell in rows[0][1]] if rows else []
    places = _places(path, header, columns)
    _check_once(path, header, [*places, *(header if keep_others else ())])
    _check_lengths(path, len(header), rows[1:])
    _check_swallowed(path, len(header), places[columns.image], separator, rows[1:])
    kept, filtered = _filtered(path, rows[1:], columns.filters, places)
    used = {places[name] for name in [columns.image, *([] if columns.templates else columns.captions)]}
    return Table(
        path,
        images=tuple(named_or_inside(_cell(row, places[columns.image]).strip()) for _, row in kept),
        captions=_captions([row for _, row in kept], columns, places),
        rows=tuple(number for number, _ in kept),
        others=tuple(_others(header, row, used) for _, row in kept)
        if keep_others and len(header) > len(used)
        else (),
        filtered=filtered,
        groups=()
        if columns.group is None
        else tuple(id_number(_cell(row, places[columns.group])) for _, row in kept),
        empty=columns.empty,
    )


def _places(path: Path, header: Sequence[str], columns: TableColumns) -> dict[str, int]:
    """Returns the place of each column that is read, by name.

    Raises InputError, which names all that are missing.
    """
    kinds = {
        "image": [columns.image],
        "caption": columns.caption_fields,
        "filter": [condition.name for condition in columns.filters],
        "group": [] if columns.group is None else [columns.group],
    }
    wanted = {name: kind for kind, names in kinds.items() for name in names}
    missing = [
        f"no {kind} column {name!r}{_near(name, header)}"
        for name, kind in wanted.items()
        if name not in header
    ]
    if missing:
        listed = ", ".join(map(repr, header)) or "none, the file is empty"
        unset = dict.fromkeys(kind for name, kind in wanted.items() if name not in header)
        raise InputError(
            f"{path}: there is {' There is '.join(missing)} Its columns are: {listed}. Set the "
            f"{' and the '.join(unset)} column, or the separator if names run together."
        )
    return {name: header.index(name) for name in wanted}


def _check_once(path: Path, header: Sequence[str], names: Sequence[str]) -> None:
    """Raises InputError for a column that is wanted and that the header names more than once."""
    if twice := [name for name in dict.fromkeys(names) if name and header.count(name) > 1]:
        raise InputError(
            f"{path}: the header names {', '.join(map(repr, twice))} more than once, so that it cannot be "
            "told which column is meant: rename the others"
        )


NumberedRow = tuple[int, list[str]]
"""A row's number from 1, and its cells."""


def _check_lengths(path: Path, columns: int, rows: Sequence[NumberedRow]) -> None:
    """Raises InputError for rows with text behind the last column, which would be lost in silence."""
    if longer := [
        number for number, row in rows if len(row) > columns and any(map(str.strip, row[columns:]))
    ]:
        raise InputError(
            f"{path}: more cells than the {columns} columns of the header in {list_rows(longer)}: put a cell "
            "that holds the separator into double quotes, or set another separator"
        )


def _check_swallowed(
    path: Path, columns: int, image: int, separator: str, rows: Sequence[NumberedRow]
) -> None:
    """Raises InputError for cells in quotes that hold lines like rows, with an image as their row has one.

    Captions hold such lines as well: there must be several with a name without white space, or its file.
    """
    swallowing = []
    for number, row in rows:
        ending = _ending(_cell(row, image))
        for lines in (cell.splitlines()[1:] for cell in row if ending and "\n" in cell):
            like_rows = (parts for line in lines if len(parts := line.split(separator)) >= columns)
            names = [name for cells in like_rows if _ending(name := cells[image].strip()) == ending]
            plain = sum(len(name.split()) == 1 for name in names)
            if plain > 1 or any(os.path.isfile(local_path(str(path.parent), name)) for name in names):
                swallowing.append(number)
    if swallowing:
        raise InputError(
            f"{path}: a cell holds lines that look like rows in {list_rows(sorted(set(swallowing)))}: its "
            f"first quote is not closed. {_QUOTES}"
        )


def _ending(name: str) -> str:
    return os.path.splitext(name.strip())[1].lower()


def _filtered(
    path: Path, rows: Sequence[NumberedRow], filters: Sequence[Filter], places: Mapping[str, int]
) -> tuple[Sequence[NumberedRow], Counter[str]]:
    """Returns the rows that fulfil all filters, and the number of others by the first that they fail.

    Raises InputError for cells that cannot be compared.
    """
    kept = list(rows)
    filtered: Counter[str] = Counter()
    for condition in filters:
        before, kept, wrong = kept, [], dict[str, list[int]]()
        for number, row in before:
            try:
                if condition.holds_for_text(_cell(row, places[condition.name])):
                    kept.append((number, row))
            except ValueError as error:
                wrong.setdefault(str(error), []).append(number)
        if wrong:
            raise InputError("\n".join(f"{path}: {list_rows(of)}: {what}" for what, of in wrong.items()))
        if len(kept) < len(before):
            filtered[condition.text] = len(before) - len(kept)
    if rows and not kept:
        raise InputError(all_filtered(str(path), filtered))
    return kept, filtered


def _captions(
    rows: Sequence[Sequence[str]], columns: TableColumns, places: Mapping[str, int]
) -> tuple[tuple[str, ...], ...]:
    """Returns the captions of all rows, for each entry of the columns."""

    def text(row: Sequence[str], column: str) -> str:
        # A cell may hold line breaks; in a shard each line would be a caption of its own.
        return " ".join(_cell(row, places[column]).split())

    def field(row: Sequence[str], column: str) -> str:
        found = text(row, column)
        return "" if found in columns.empty else found

    if columns.templates:
        return tuple(
            tuple(filled(template, partial(field, row)) for row in rows) for template in columns.templates
        )
    return tuple(tuple(text(row, column) for row in rows) for column in columns.captions)


def check_tables(files: Sequence[str], data: Data, key: str) -> int:
    """Returns the number of samples of an epoch: `check` of READERS.

    Raises InputError, which lists the tables that cannot be read and the images that are missing.
    """
    tables: list[Table] = []
    problems: list[str] = []
    columns = TableColumns.by(data)
    for file in files:
        try:
            table = read_table(file, columns)
        except InputError as problem:
            problems.append(str(problem))
            continue
        tables.append(table)
        missing = missing_images(table)
        if missing:
            first = table.image_path(table.rows.index(missing[0]))
            problems.append(
                f"{file}: {len(missing)} of {len(table.rows)} image files of column {data.image_column!r} "
                f"are missing: {list_rows(missing)}; the first is {first} (relative paths start at the "
                f"table's folder){drive_advice(table.images)}"
            )
    rows = [len(table.rows) for table in tables]
    try:
        Allowed.by(data).check(left_out_of(tables), sum(rows))
    except InputError as problem:
        problems.append(f"{key}: {problem}")
    if problems:
        raise InputError("\n".join(problems))
    return samples_of_an_epoch(rows, data)


def captions_of_table(file: str, data: Data) -> Iterator[str]:
    """Yields the captions of a table's rows: `captions` of READERS."""
    table = read_table(file, TableColumns.by(data))
    for number in range(len(table.rows)):
        yield from table.captions_of(number).texts


def missing_images(table: Table) -> list[int]:
    """Returns the rows that name an image file which does not exist."""
    return [
        row
        for number, row in enumerate(table.rows)
        if table.images[number]
        and not is_url(table.images[number])
        and not os.path.isfile(table.image_path(number))  # also a name that no file system allows
    ]


def list_rows(rows: Sequence[int]) -> str:
    """Returns the first of the row numbers, for a message."""
    shown = ", ".join(str(row) for row in rows[:SHOWN_ROWS])
    return f"row{'s' if len(rows) > 1 else ''} {shown}" + (
        f" and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else ""
    )


def _rows(path: Path, separator: str, columns: TableColumns) -> list[NumberedRow]:
    """Returns the rows that are not blank, each with its number from 1."""
    encoding = columns.encoding
    quoting: Literal[0, 3] = csv.QUOTE_NONE if columns.quotes == "text" else csv.QUOTE_MINIMAL
    csv.field_size_limit(LONGEST_CELL)
    rows: list[NumberedRow] = []
    number = 0
    try:
        # Bytes that are not text come through as surrogates and are found in their row, since decoding runs
        # ahead of the row.
        with io.TextIOWrapper(
            _opened(path),
            newline="",
            encoding="utf-8-sig" if encoding == "utf-8" else encoding,
            errors="surrogateescape",
        ) as file:
            # With `strict`, a quote that is never closed is an error; else it would swallow all later rows in
            # silence.
            reader = csv.reader(file, delimiter=separator, strict=True, quoting=quoting)
            for number, row in enumerate(reader, start=1):
                if any(cell.strip() for cell in row):
                    "".join(row).encode()
                    rows.append((number, row))
    except OSError as error:
        raise InputError(f"{path}: the table cannot be read: {error.strerror}") from error
    except UnicodeEncodeError as error:
        byte = ord(error.object[error.start]) & 0xFF
        raise InputError(
            f"{path}: row {number} is not {encoding.upper()} text (it has the byte 0x{byte:02x}): name the "
            'table\'s encoding with data.encoding = "gb18030" in a job, --encoding in a command, or save '
            "it as UTF-8"
        ) from error
    except csv.Error as error:
        raise InputError(f"{path}: row {number + 1} cannot be read ({error}). {_QUOTES}") from error
    return rows


def _opened(path: Path) -> BinaryIO:
    """Opens the table's file, or a pipe; a pipe that nobody writes is empty.

    Raises InputError for a device.
    """
    file = open_at_once(path)
    status = os.fstat(file.fileno())
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
        file.close()
        raise InputError(f"{path}: the table cannot be read: it is {kind_of_file(status)}, not a file")
    return file


def _others(header: Sequence[str], row: Sequence[str], known: set[int]) -> dict[str, str]:
    return {name: _cell(row, column) for column, name in enumerate(header) if column not in known}


def _cell(row: Sequence[str], column: int) -> str:
    """Returns a cell; empty if the row is cut short."""
    return row[column] if column < len(row) else ""


def _near(name: str, header: Sequence[str]) -> str:
    near = column_meant(name, header)
    return f"; did you mean {near!r}?" if near else "."


def unfilled(table: Table, columns: TableColumns) -> list[str]:
    """Returns a message for the image column, and one for the captions, where cells are empty."""
    problems = [] if table.rows else [f"{table.path}: no rows below the header"]
    captions = [any(texts) for texts in zip(*table.captions, strict=True)]
    for names, cells in (([columns.image], table.images), (columns.caption_fields, captions)):
        if empty := [row for row, cell in zip(table.rows, cells, strict=True) if not cell]:
            every = "every row" if len(empty) == len(table.rows) > 1 else list_rows(empty)
            of = (
                f"column {names[0]!r} is" if len(names) == 1 else f"columns {', '.join(map(repr, names))} are"
            )
            problems.append(f"{table.path}: {of} empty in {every}: fill in the cells or remove the rows")
    return problems
