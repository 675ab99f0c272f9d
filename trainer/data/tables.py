"""CSV, TSV and Parquet tables of image files and captions. No torch."""

import csv
import io
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO

from trainer.data.files import open_at_once, read_file
from trainer.data.sample import MOST_BYTES, LeftOut, Numbering, RawSample, check_file, kind_of_file
from trainer.errors import InputError

SHOWN_ROWS = 10
LONGEST_CELL = 2**24


@dataclass(frozen=True)
class Table:
    """A table with an image and a caption in every row."""

    path: Path
    images: tuple[str, ...]
    """Paths as the table gives them; relative ones start at the table's folder."""
    captions: tuple[str, ...]
    """One caption for each image, in one line: any run of white space is a single space."""
    rows: tuple[int, ...]
    """Row numbers as a spreadsheet shows them: the header is row 1."""
    others: tuple[Mapping[str, str], ...] = ()
    """Cells of all other columns, by column, if they were asked for."""

    def image_path(self, number: int) -> Path:
        """Returns the image file of a row, counted from 0 without the header."""
        return self.path.parent / self.images[number]

    def origin(self, number: int) -> str:
        """Returns table and row, for messages."""
        return f"{self.path}: row {self.rows[number]}"

    def read_image(self, number: int, most_bytes: int = MOST_BYTES) -> bytes:
        """Returns the image file's content.

        Raises BadSample if it is no file or too large, and StorageError if it stays unreadable.
        """
        path, origin = self.image_path(number), self.origin(number)
        return read_file(
            path,
            f"{origin}: image {path}",
            lambda status: check_file(origin, self.images[number], status, most_bytes),
        )


class TableSource:
    """Source of the samples of several tables; images are files beside the tables."""

    left_out = LeftOut()

    def __init__(self, tables: Sequence[Table], most_bytes: int = MOST_BYTES) -> None:
        self._tables, self._most_bytes = tuple(tables), most_bytes
        self._numbering = Numbering(self.shard_sizes())

    def __len__(self) -> int:
        return self._numbering.samples

    def shard_sizes(self) -> list[int]:
        return [len(table.rows) for table in self._tables]

    def read(self, index: int) -> RawSample:
        table_number, number = self._numbering.locate(index)
        table = self._tables[table_number]
        return RawSample(
            table.images[number],
            table.origin(number),
            table.read_image(number, self._most_bytes),
            (table.captions[number],),
        )


class ImageSource:
    """Source of the images of several tables, each once, with the captions of all rows that name it.

    Images come in the order of their first rows.
    """

    left_out = LeftOut()

    def __init__(
        self, rows: Mapping[Path, Sequence[tuple[Table, int]]], most_bytes: int = MOST_BYTES
    ) -> None:
        self._most_bytes = most_bytes
        self._rows = [tuple(of_image) for of_image in rows.values()]

    def __len__(self) -> int:
        return len(self._rows)

    def shard_sizes(self) -> list[int]:
        return [len(self._rows)]

    def read(self, index: int) -> RawSample:
        table, number = self._rows[index][0]
        captions = tuple(of.captions[row] for of, row in self._rows[index])
        return RawSample(
            table.images[number], table.origin(number), table.read_image(number, self._most_bytes), captions
        )


def by_image(tables: Sequence[Table], most_bytes: int = MOST_BYTES) -> ImageSource:
    """Gathers the tables' rows by the image file that they name, however the tables write its path."""
    rows: dict[Path, list[tuple[Table, int]]] = {}
    for table in tables:
        for number in range(len(table.rows)):
            path = Path(os.path.normpath(table.image_path(number)))
            rows.setdefault(path, []).append((table, number))
    return ImageSource(rows, most_bytes)


def read_table(
    path: str | Path,
    image_column: str,
    caption_column: str,
    separator: str | None = None,
    keep_others: bool = False,
    encoding: str = "utf-8",
) -> Table:
    """Reads a table; opens no image file.

    `separator` None means a tab if the name ends in .tsv, else a comma. Raises InputError for a missing
    column (the message lists the columns), for text of another encoding, and for rows without image
    or caption.
    """
    path = Path(path)
    rows = (
        _parquet_rows(path)
        if path.suffix == ".parquet"
        else _rows(path, separator or ("\t" if path.suffix == ".tsv" else ","), encoding)
    )
    header = [cell.strip() for cell in rows[0][1]] if rows else []
    image_at, caption_at = (
        _column(path, header, "image", image_column),
        _column(path, header, "caption", caption_column),
    )
    table = Table(
        path,
        images=tuple(_cell(row, image_at).strip() for _, row in rows[1:]),
        # A cell may hold line breaks; in a shard each line would be a caption of its own.
        captions=tuple(" ".join(_cell(row, caption_at).split()) for _, row in rows[1:]),
        rows=tuple(number for number, _ in rows[1:]),
        others=tuple(_others(header, row, {image_at, caption_at}) for _, row in rows[1:])
        if keep_others and len(header) > 2
        else (),
    )
    _check_filled(table, image_column, caption_column)
    return table


def missing_images(table: Table) -> list[int]:
    """Returns the rows whose image file does not exist."""
    return [row for number, row in enumerate(table.rows) if not table.image_path(number).is_file()]


def list_rows(rows: Sequence[int]) -> str:
    """Returns the first of the row numbers, for a message."""
    shown = ", ".join(str(row) for row in rows[:SHOWN_ROWS])
    return f"row{'s' if len(rows) > 1 else ''} {shown}" + (
        f" and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else ""
    )


def _rows(path: Path, separator: str, encoding: str) -> list[tuple[int, list[str]]]:
    """Returns the rows that are not blank, each with its number from 1."""
    csv.field_size_limit(LONGEST_CELL)
    rows: list[tuple[int, list[str]]] = []
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
            for number, row in enumerate(csv.reader(file, delimiter=separator, strict=True), start=1):
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
        advice = "a cell that begins with a quote must end with one, and a quote inside it is doubled"
        raise InputError(f"{path}: row {number + 1} cannot be read ({error}): {advice}") from error
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


def _parquet_rows(path: Path) -> list[tuple[int, list[str]]]:
    """Returns the column names, then the rows; each cell as text."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise InputError(
            f"{path}: Parquet needs the package pyarrow: pip install 'clipship[launch]'"
        ) from error
    if path.exists() and not path.is_file():
        raise InputError(
            f"{path}: not a Parquet file that can be read: it is {kind_of_file(path.stat())}, not a file"
        )
    try:
        columns = parquet.read_table(path).to_pydict()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise InputError(f"{path}: not a Parquet file that can be read: {error}") from error
    cells = zip(*columns.values(), strict=True)
    return [
        (1, list(columns)),
        *(
            (number, ["" if cell is None else str(cell) for cell in row])
            for number, row in enumerate(cells, start=2)
        ),
    ]


def _others(header: Sequence[str], row: Sequence[str], known: set[int]) -> dict[str, str]:
    return {name: _cell(row, column) for column, name in enumerate(header) if column not in known}


def _cell(row: Sequence[str], column: int) -> str:
    """Returns a cell; empty if the row is cut short."""
    return row[column] if column < len(row) else ""


def _column(path: Path, header: Sequence[str], kind: str, name: str) -> int:
    if name in header:
        return header.index(name)
    near = get_close_matches(name, header, n=1)
    listed = ", ".join(map(repr, header)) or "none, the file is empty"
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise InputError(
        f"{path}: there is no {kind} column {name!r}{hint} Its columns are: {listed}. Set the {kind} column, "
        "or the separator if names run together."
    )


def _check_filled(table: Table, image_column: str, caption_column: str) -> None:
    problems = [] if table.rows else [f"{table.path}: no rows below the header"]
    for column, cells in ((image_column, table.images), (caption_column, table.captions)):
        if empty := [row for row, cell in zip(table.rows, cells, strict=True) if not cell]:
            every = "every row" if len(empty) == len(table.rows) > 1 else list_rows(empty)
            problems.append(
                f"{table.path}: column {column!r} is empty in {every}: fill in the cells or remove the rows"
            )
    if problems:
        raise InputError("\n".join(problems))
