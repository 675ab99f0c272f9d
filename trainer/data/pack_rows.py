"""The rows that are packed into shards: of a text table, or of a table in row groups. No torch.

Rows of a text table are in memory, as its images are files. A table in row groups is read again for each
shard, group by group.
"""

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trainer.config import Data
from trainer.config.formats import FORMATS, row_of
from trainer.data.captions import Captions, captions_in
from trainer.data.columnar import Columns, check_columns
from trainer.data.files import Stamp, stamp
from trainer.data.image_cells import drive_advice, image_cell, is_url, named_image
from trainer.data.row_groups import cells_of, open_groups
from trainer.data.sample import kind_of_file
from trainer.data.tables import Table, TableColumns, list_rows, read_all_rows, unfilled
from trainer.errors import InputError, StorageError

IMAGE_ENDINGS: tuple[str, ...] = Data.model_fields["image_key"].default


class PackRow(NamedTuple):
    """One row."""

    number: int
    """Number of the row, from 0, which becomes the key of the sample."""
    image: object
    """The path of the image file, or what a cell has in its place: bytes, a path or a URL as text."""
    origin: str
    """Table and row, for messages."""
    captions: str | ValueError
    """A caption in each line; or why the row has none."""
    other: str
    """The other columns as JSON; empty if there are none."""
    table: str = ""
    """Path of the table, at whose folder a relative path of a cell starts."""
    bytes_in: tuple[str, ...] = ()
    """Other columns whose cells hold bytes, which JSON does not have: they are null there."""


def lines(captions: Callable[[], Captions]) -> str | ValueError:
    """Returns a row's captions, one a line; or why it has none."""
    try:
        return "\n".join(captions().texts)
    except ValueError as error:
        return error


class Rows(Protocol):
    """A table's rows."""

    @property
    def identity(self) -> object:
        """Value that changes with the rows."""

    def __len__(self) -> int: ...
    def part(self, begin: int, end: int) -> Iterable[PackRow]:
        """Returns the rows from `begin` up to `end`; picklable."""

    def image_bytes(self) -> Iterator[int]:
        """Yields the size of each row's image. Raises InputError, which names the row, for an address."""

    def problems(self, *, any_ending: bool, skip_bad: bool) -> Iterator[str]:
        """Yields what is wrong with the images, as far as it shows without reading them.

        With `any_ending` they are encoded anew; with `skip_bad` images may be missing.
        """


def rows_of_table(path: Path, data: Data) -> Rows:
    """Returns the rows of a table that `data` describes, by the ending of its name.

    Raises InputError for a table that cannot be read, and for a missing column.
    """
    if FORMATS[row_of(path.name).name].fields != "nested columns":
        columns = TableColumns.by(data)
        return TextRows(read_all_rows(path, columns, keep_others=True), columns)
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: the table cannot be read: it is {kind_of_file(path.stat())}, not a file")
    return GroupRows.of(path, data)


@dataclass(frozen=True)
class TextRows:
    """Rows of a .csv or .tsv table."""

    table: Table
    columns: TableColumns

    @property
    def identity(self) -> object:
        table = self.table
        return (str(table.path.absolute()), table.images, self._files, table.captions, table.others)

    @cached_property
    def _files(self) -> tuple[Stamp | None, ...]:
        """Size and time of each row's image file; None if it names none that is there.

        Each is asked for once: on a network file system that takes long.
        """
        return tuple(
            None if not name or is_url(name) else _stamp_of(self.table.image_path(row))
            for row, name in enumerate(self.table.images)
        )

    def __len__(self) -> int:
        return len(self.table.rows)

    def part(self, begin: int, end: int) -> tuple[PackRow, ...]:
        others = self.table.others or ({},) * len(self.table.rows)
        return tuple(
            PackRow(
                row,
                self._image(row),
                self.table.origin(row),
                lines(partial(self.table.captions_of, row)),
                _json(others[row]),
            )
            for row in range(begin, end)
        )

    def _image(self, row: int) -> Path | str | None:
        """Returns a row's image: its file, or its address; None if it has none."""
        name = self.table.images[row]
        if not name:
            return None
        return name if is_url(name) else self.table.image_path(row).absolute()

    def image_bytes(self) -> Iterator[int]:
        for row, (name, file) in enumerate(zip(self.table.images, self._files, strict=True)):
            _check_sized(name, self.table.origin(row))
            yield file.size if file else 0

    def problems(self, *, any_ending: bool, skip_bad: bool) -> Iterator[str]:
        table = self.table
        yield from [] if skip_bad else unfilled(table, self.columns)
        missing = [
            row
            for row, name, file in zip(table.rows, table.images, self._files, strict=True)
            if name and not is_url(name) and file is None
        ]
        if missing and not skip_bad:
            yield (
                f"{table.path}: image file missing in {list_rows(missing)}; relative paths start at "
                f"{table.path.parent.absolute()}{drive_advice(table.images)}"
            )
        unknown = [
            row
            for row, image in zip(table.rows, table.images, strict=True)
            if image and ending_of(image) not in IMAGE_ENDINGS and not is_url(image)
        ]
        if unknown and not any_ending:
            yield (
                f"{table.path}: an image is none of {allowed_endings()} in {list_rows(unknown)}: convert or "
                "remove these images"
            )


@dataclass(frozen=True)
class GroupRows:
    """Rows of a Parquet or Arrow table."""

    path: str
    form: str
    sizes: tuple[int, ...]
    """Rows of each group."""
    columns: Columns
    others: tuple[str, ...]
    """Names of the columns that become JSON."""
    version: object
    begin: int = 0
    end: int = 0

    @classmethod
    def of(cls, path: Path, data: Data) -> "GroupRows":
        """Returns all rows of a table."""
        columns, name = Columns.by(data), str(path.absolute())
        used = {str(place[0]) for place in (columns.image, *(() if columns.templates else columns.captions))}
        with open_groups(name, row_of(name).name) as groups:
            check_columns(name, groups, [*columns.names, *groups.columns])
            return cls(
                name,
                row_of(name).name,
                tuple(groups.sizes),
                columns,
                tuple(column for column in groups.columns if column not in used),
                stamp(name),
                end=sum(groups.sizes),
            )

    @property
    def identity(self) -> object:
        return (self.path, self.version, self.columns, self.others)

    def __len__(self) -> int:
        return self.end - self.begin

    def part(self, begin: int, end: int) -> "GroupRows":
        return GroupRows(
            self.path, self.form, self.sizes, self.columns, self.others, self.version, begin, end
        )

    def __iter__(self) -> Iterator[PackRow]:
        columns = self.columns
        names = list(dict.fromkeys([*columns.names, *self.others]))
        for number, cells in self._cells(names):
            others = {name: cells[name] for name in self.others}
            image = image_cell(cells, columns.image)
            yield PackRow(
                number,
                image,
                self._origin(number),
                lines(partial(captions_in, cells, columns.captions, columns.templates, columns.empty)),
                _json(others),
                self.path,
                tuple(name for name, cell in others.items() if _has_bytes(cell)),
            )

    def image_bytes(self) -> Iterator[int]:
        for number, cells in self._cells([str(self.columns.image[0])]):
            cell = image_cell(cells, self.columns.image)
            name = named_image(cell, self.path)
            _check_sized(name or "", self._origin(number))
            file = _stamp_of(name) if name else None
            yield len(cell) if isinstance(cell, bytes) else file.size if file else 0

    def problems(self, *, any_ending: bool, skip_bad: bool) -> Iterator[str]:
        return iter(())  # images lie in the table: each shows what is wrong with it when it is read

    def _origin(self, number: int) -> str:
        """Returns table and row, for messages."""
        return f"{self.path}: row {number + 1}"

    def _cells(self, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields number and cells of each row, read group by group. Raises StorageError as reading fails."""
        try:
            with open_groups(self.path, self.form) as groups:
                for group, last in enumerate(accumulate(self.sizes)):
                    first = last - self.sizes[group]
                    if first < self.end and last > self.begin:
                        begin, end = max(0, self.begin - first), min(last, self.end) - first
                        cells = islice(cells_of(groups, group, names), begin, end)
                        yield from enumerate(cells, start=first + begin)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read: {error.strerror or error}") from error


def _stamp_of(path: Path | str) -> Stamp | None:
    """Returns size and time of a file; None if there is no regular file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return Stamp(status.st_size, str(status.st_mtime_ns)) if stat.S_ISREG(status.st_mode) else None


def _check_sized(name: str, origin: str) -> None:
    """Raises InputError if an image is at an address: its size is known only when it is fetched."""
    if is_url(name):
        raise InputError(
            f"{origin}: --shard-mb cuts by the sizes of files, and its image is at an address: give "
            "--samples-per-shard instead"
        )


def ending_of(name: str) -> str:
    """Returns the ending of a file's name, without the dot, in lower case."""
    return Path(name).suffix.removeprefix(".").lower()


def allowed_endings() -> str:
    """Returns the endings of images that a job expects, for a message."""
    return ", ".join("." + ending for ending in IMAGE_ENDINGS)


def _json(cells: object) -> str:
    return json.dumps(cells, ensure_ascii=False, sort_keys=True, default=_plain) if cells else ""


def _has_bytes(cell: object) -> bool:
    """Returns whether a cell is bytes, or a list or a struct with some."""
    if isinstance(cell, list | tuple):
        return any(map(_has_bytes, cell))
    return _has_bytes(list(cell.values())) if isinstance(cell, dict) else isinstance(cell, bytes)


def _plain(value: object) -> str | None:
    """Returns a value that JSON does not have, such as a date, as text; None for bytes."""
    return None if isinstance(value, bytes) else str(value)
