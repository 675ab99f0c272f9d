"""The rows that are packed into shards: of a text table, or of a table in row groups. No torch.

Rows of a text table are in memory, as its images are files. A table in row groups is read again for each
shard, group by group.
"""

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trainer.config import Data
from trainer.config.formats import FORMATS, row_of
from trainer.data.captions import Captions, captions_in, gathered
from trainer.data.columnar import Columns, check_columns
from trainer.data.files import Stamp, stamp
from trainer.data.image_cells import INSIDE, drive_advice, image_cell, is_url, named_image
from trainer.data.row_groups import cells_of, open_groups
from trainer.data.sample import kind_of_file
from trainer.data.tables import Table, TableColumns, list_rows, read_all_rows, unfilled
from trainer.errors import InputError, StorageError
from trainer.safe_io.plain import parse_json
from trainer.text.wording import many

IMAGE_ENDINGS: tuple[str, ...] = Data.model_fields["image_key"].default


_IMAGES, _TEXTS = "_imgs.tsv", "_texts.jsonl"
"""Ends of the names of Chinese-CLIP's pair of files: ids with pictures in base64, and texts with such ids."""


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
    texts = path.with_name(path.name.removesuffix(_IMAGES) + _TEXTS)
    if path.name.endswith(_IMAGES) and texts.is_file():
        return ImageLines.of(path, texts, data.empty_captions)
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
            yield file.size if file else _inside(name)

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
class ImageLines:
    """Pictures of a file of Chinese-CLIP's, each with the texts that name it."""

    path: str
    places: tuple[tuple[int, str, tuple[str, ...]], ...]
    """Offset of each picture's line, its id and its captions."""
    empty: tuple[str, ...]
    version: object
    lost: int
    """Number of texts that name a picture which is not there."""
    begin: int = 0

    @classmethod
    def of(cls, path: Path, texts: Path, empty: tuple[str, ...]) -> "ImageLines":
        """Raises InputError for texts that are not as Chinese-CLIP writes them."""
        captions, number = dict[str, list[str]](), 0
        try:
            with texts.open(encoding="utf-8") as file:
                for text in file:
                    number += 1
                    row = parse_json(text)
                    for image in row["image_ids"]:
                        captions.setdefault(str(image), []).append(" ".join(str(row["text"]).split()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{texts}: line {number} has no text and image_ids, as Chinese-CLIP writes them: {error!r}"
            ) from None
        places = []
        with path.open("rb") as pictures:
            at = 0
            for line in pictures:
                name = line.partition(b"\t")[0].decode(errors="replace")
                places.append((at, name, tuple(captions.pop(name, ()))))
                at += len(line)
        lost = sum(map(len, captions.values()))
        version = (stamp(str(path)), stamp(str(texts)))
        return cls(str(path.absolute()), tuple(places), empty, version, lost)

    @property
    def identity(self) -> object:
        return (self.path, self.version)

    def __len__(self) -> int:
        return len(self.places)

    def part(self, begin: int, end: int) -> "ImageLines":
        return replace(self, places=self.places[begin:end], begin=begin)

    def __iter__(self) -> Iterator[PackRow]:
        with open(self.path, "rb") as file:
            for number, (at, name, captions) in enumerate(self.places, self.begin):
                file.seek(at)
                picture = file.readline().partition(b"\t")[2].decode("ascii", errors="replace").strip()
                texts = lines(partial(gathered, [captions], self.empty))
                yield PackRow(
                    number,
                    f"{INSIDE}{picture}",
                    f"{self.path}: image {name}",
                    texts,
                    _json({"image_id": name}),
                )

    def image_bytes(self) -> Iterator[int]:
        ends = [at for at, _, _ in self.places[1:]] + [os.path.getsize(self.path)]
        yield from ((end - at) * 3 // 4 for end, (at, _, _) in zip(ends, self.places, strict=True))

    def problems(self, *, any_ending: bool, skip_bad: bool) -> Iterator[str]:
        if self.lost and not skip_bad:
            yield (
                f"{self.path}: {many(self.lost, 'text')} beside it name pictures that it lacks: "
                "--skip-bad-rows leaves them out"
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
        return replace(self, begin=begin, end=end)

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
            yield len(cell) if isinstance(cell, bytes) else file.size if file else _inside(name or "")

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
    if is_url(name) and not name.startswith(INSIDE):
        raise InputError(
            f"{origin}: --shard-mb cuts by the sizes of files, and its image is at an address: give "
            "--samples-per-shard instead"
        )


def _inside(name: str) -> int:
    """Returns the bytes of a picture that a cell holds in base64; 0 for others."""
    return len(name) * 3 // 4 if name.startswith(INSIDE) else 0


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
