"""Files of tables in row groups: Parquet, and Arrow with its record batches. No torch.

A group is what is read and decoded at once. Arrow files may have the file format, or, if they are local, the
stream format, as Hugging Face's datasets are stored. pyarrow is imported when a file is opened.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, BinaryIO, NamedTuple, Protocol

from trainer.config import is_remote
from trainer.config.caption_key import Path
from trainer.data.blocks import BlockReader, gap_bytes
from trainer.data.files import opened
from trainer.data.recent import Recent
from trainer.errors import InputError
from trainer.sysinfo.extras import require
from trainer.text.wording import many

ROWS_AT_ONCE = 64
"""Rows that are decoded before the memory that they take is compared with the limit."""
BATCH_BYTES = 2**12
"""Memory of a batch beside that of its columns."""
OPEN_FILES = 64
MOST_PACKED_BYTES = 2**26
"""Largest number of bytes to which the batches of an Arrow stream may unpack."""


class DamagedTable(InputError):
    """Raised for a file, or a row group, that cannot be decoded."""


class Groups(Protocol):
    """An open file in row groups."""

    @property
    def sizes(self) -> Sequence[int]:
        """Number of rows of each group."""

    @property
    def columns(self) -> Sequence[str]:
        """Names of the columns."""

    def unpacked_bytes(self, group: int, columns: Sequence[str]) -> int:
        """Returns the memory in bytes that columns of a group take, as the file says; 0 if it does not."""

    def fetch(self, group: int, columns: Sequence[str], most_gap: int) -> None:
        """Reads the columns of a group at once, if there are at most `most_gap` bytes between them."""

    def naming(self, group: int, place: Path) -> Sequence[str]:
        """Returns the columns to read for the images that a group names; none if it surely holds them."""

    def read(self, group: int, columns: Sequence[str]) -> Iterator[tuple[Any, int]]:
        """Yields the columns of one group as pyarrow.RecordBatch, and the memory of each in bytes.

        They come in the order of the rows, and end with the group.
        """

    def through(self, file: BinaryIO) -> "Groups":
        """Returns the same groups, read by another opening of the file, which one thread has to itself."""


class ParquetGroups:
    """Row groups of a Parquet file."""

    def __init__(self, file: BinaryIO, _path: str, metadata: Any = None) -> None:
        from pyarrow import parquet

        self._content = file
        self._file = parquet.ParquetFile(
            file, metadata=metadata, pre_buffer=False, page_checksum_verification=True
        )
        metadata = self._file.metadata
        self.sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        self.columns = list(self._file.schema_arrow.names)

    def through(self, file: BinaryIO) -> "ParquetGroups":
        return ParquetGroups(file, "", self._file.metadata)

    def unpacked_bytes(self, group: int, columns: Sequence[str]) -> int:
        return sum(int(part.total_uncompressed_size) for part in self._chunks(group, columns))

    def _chunks(self, group: int, columns: Sequence[str]) -> list[Any]:
        """Returns what the file says of the parts in which columns of a group lie."""
        described = self._file.metadata.row_group(group)
        parts = (described.column(number) for number in range(described.num_columns))
        return [
            part
            for part in parts
            if part.path_in_schema.partition(".")[0] in columns or part.path_in_schema in columns
        ]

    def limits(self, column: str, kind: type) -> list[tuple[Any, Any]]:
        """Returns the least and the largest value of a column in each group.

        Raises ValueError if the file does not say them, or if they are not of this kind.
        """
        every = [self._chunks(group, [column])[:1] for group in range(len(self.sizes))]
        found = [(known.min, known.max) for parts in every for part in parts if (known := part.statistics)]
        if len(found) < len(every) or not all(isinstance(value, kind) for pair in found for value in pair):
            raise ValueError(f"it does not say the least and the largest {column} of each row group")
        return found

    def fetch(self, group: int, columns: Sequence[str], most_gap: int) -> None:
        """Reads the columns of a group at once, if there are at most `most_gap` bytes between them."""
        spans = sorted(
            (begin, begin + part.total_compressed_size)
            for part in self._chunks(group, columns)
            for begin in [min(filter(None, (part.dictionary_page_offset, part.data_page_offset)), default=0)]
        )
        gaps = sum(max(0, begin - end) for (_, end), (begin, _) in pairwise(spans))
        if spans and gaps <= most_gap:
            begin, end = spans[0][0], max(end for _, end in spans)
            self._content.seek(begin)
            self._content.read(end - begin)

    def naming(self, group: int, place: Path) -> Sequence[str]:
        """Returns the columns to read for the images that a group names; none if it holds them.

        The file says of which kind a column is, and how many rows of Hugging Face's struct have no bytes.
        """
        schema, name = self._file.schema, ".".join(map(str, place))
        leaves = {schema.column(number).path: number for number in range(len(schema))}
        if (number := leaves.get(name)) is not None:
            return [name] if schema.column(number).logical_type.type == "STRING" else []
        if (number := leaves.get(f"{name}.bytes")) is not None and f"{name}.path" in leaves:
            chunk = self._file.metadata.row_group(group).column(number)
            if (known := chunk.statistics) is not None and known.has_null_count:
                return [f"{name}.path"] if known.null_count == chunk.num_values else []
        return [str(place[0])]

    def read(self, group: int, columns: Sequence[str]) -> Iterator[tuple[Any, int]]:
        # In the order of the file, so that far storage is read forward.
        ordered = [name for name in self.columns if name in columns] or list(columns)
        batches = self._file.iter_batches(
            ROWS_AT_ONCE, row_groups=[group], columns=ordered, use_threads=False
        )
        return ((batch, batch.nbytes) for batch in batches)


class ArrowGroups:
    """Record batches of an Arrow file, which is mapped into memory: what is not packed takes none."""

    def __init__(self, _file: BinaryIO, path: str) -> None:
        import pyarrow
        from pyarrow import ipc

        if is_remote(path):
            raise InputError(
                f"{path}: an Arrow file is mapped into memory, so it must be a local one; Parquet may be "
                "behind a URL"
            )
        mapped = pyarrow.memory_map(path)
        self._path, self._size = path, mapped.size()
        try:
            reader = ipc.open_file(mapped)
            self._batch: Callable[[int], Any] = reader.get_batch
            self.sizes = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
        except pyarrow.ArrowInvalid:
            reader = ipc.open_stream(pyarrow.memory_map(path))
            batches = list(_unpacked(reader, path))
            self._batch = batches.__getitem__
            self.sizes = [batch.num_rows for batch in batches]
        self.columns = list(reader.schema.names)

    def through(self, _file: BinaryIO) -> "ArrowGroups":
        return self

    def unpacked_bytes(self, group: int, columns: Sequence[str]) -> int:
        return 0

    def fetch(self, group: int, columns: Sequence[str], most_gap: int) -> None:
        pass

    def naming(self, group: int, place: Path) -> Sequence[str]:
        return [str(place[0])]

    def read(self, group: int, columns: Sequence[str]) -> Iterator[tuple[Any, int]]:
        from pyarrow import total_allocated_bytes

        # The kernel ends a process that reads what was mapped and is no longer there, without a word.
        if (left := os.stat(self._path).st_size) < self._size:
            raise InputError(
                f"{self._path}: the file was cut short under the run: it had {many(self._size, 'byte')} and "
                f"has {left:,}. Put back what was there and start the run again."
            )
        before = total_allocated_bytes()
        batch = self._batch(group).select(list(columns))
        size = max(0, total_allocated_bytes() - before)
        for begin in range(0, batch.num_rows, ROWS_AT_ONCE):
            yield batch.slice(begin, ROWS_AT_ONCE), size
            size = 0


def _unpacked(reader: Any, path: str) -> Iterator[Any]:
    """Yields the batches of a stream. Raises InputError if they are compressed, as all would be in memory."""
    from pyarrow import total_allocated_bytes

    before = total_allocated_bytes()
    for batch in reader:
        if total_allocated_bytes() - before > MOST_PACKED_BYTES:
            raise InputError(
                f"{path}: a compressed Arrow stream can only be read as a whole: write it as Parquet, or as "
                "an Arrow file"
            )
        yield batch


OPENERS: Mapping[str, Callable[[BinaryIO, str], Groups]] = {"parquet": ParquetGroups, "arrow": ArrowGroups}
"""Functions from an open file and its path to its groups, by the values of data.format."""


def groups_in(file: BinaryIO, path: str, form: str) -> Groups:
    """Returns the groups of an open file. Raises InputError, which names the file, if it has none."""
    require("pyarrow")
    with readable(path):
        return OPENERS[form](file, path)


def cells_of(groups: Groups, group: int, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the cells of each row of a group by column, as Python values."""
    for batch, _ in groups.read(group, columns):
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:
            yield from (row_of(batch, row) for row in range(batch.num_rows))


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Turns pyarrow's errors for a malformed file into DamagedTable, which names the file."""
    import pyarrow

    try:
        yield
    except InputError:
        raise
    except (pyarrow.ArrowException, ValueError, KeyError, OSError) as error:
        # pyarrow raises OSError without a number for what it cannot decode, and with one if reading fails.
        if isinstance(error, OSError) and (error.errno is not None or is_remote(path)):
            raise
        raise DamagedTable(f"{path}: cannot be read as a table: {' '.join(str(error).split())}") from error


@contextmanager
def open_groups(path: str, form: str) -> Iterator[Groups]:
    """Opens a table for the block of `with`.

    Raises InputError, which names the table, if it cannot be decoded, also in the block.
    """
    with opened(path) as file, readable(path):
        yield groups_in(file, path, form)


class HeldGroup(NamedTuple):
    """A row group in memory."""

    batches: list[Any]
    ends: list[int]
    """Number of the row behind each batch."""
    size: int
    """Bytes."""

    def row(self, row: int) -> dict[str, Any]:
        """Returns the cells of one row by column, as Python values."""
        number = bisect_right(self.ends, row)
        batch = self.batches[number]
        return row_of(batch, row - self.ends[number] + batch.num_rows)


class GroupReader:
    """Reads and decodes row groups of which none takes more than `limit_bytes`; threads may call it."""

    def __init__(self, form: str, columns: Sequence[str], limit_bytes: int, blocks: BlockReader) -> None:
        self.form, self.columns, self.limit_bytes, self.blocks = form, tuple(columns), limit_bytes, blocks
        self._known: Recent[str, Groups] = Recent(OPEN_FILES)

    def groups(self, path: str) -> Groups:
        """Returns the groups of a file, opened for this call alone."""
        file = self.blocks.file(path)
        with readable(path):
            return self._known.get(path, lambda: groups_in(file, path, self.form)).through(file)

    def batches(self, path: str, group: int) -> Iterator[tuple[Any, int]]:
        """Yields the columns of a group as `Groups.read` does.

        Raises DamagedTable if the group cannot be decoded, InputError if it is larger than the limit, and
        StorageError if the file stays unreadable.
        """
        held = 0
        groups = self.groups(path)
        with readable(path):
            groups.fetch(group, self.columns, gap_bytes(path))
            for batch, size in groups.read(group, self.columns):
                held += size
                if held > self.limit_bytes:
                    raise InputError(too_large(path, group, self.limit_bytes))
                yield batch, size

    def held(self, path: str, group: int) -> HeldGroup:
        """Returns a whole group. Raises as `batches` does."""
        read = list(self.batches(path, group))
        ends = list(accumulate(batch.num_rows for batch, _ in read))
        # A batch of a file that is mapped has no bytes of its own, but is an object.
        return HeldGroup([batch for batch, _ in read], ends, sum(size + BATCH_BYTES for _, size in read))


def row_of(batch: Any, row: int) -> dict[str, Any]:
    """Returns the cells of one row of a batch by column, as Python values.

    A cell with a text that is no UTF-8 is the bytes of that text: it makes one bad sample.
    """
    return {name: _value(column[row]) for name, column in zip(batch.schema.names, batch.columns, strict=True)}


def _value(cell: Any) -> object:
    try:
        found: object = cell.as_py()
    except UnicodeDecodeError as error:
        return bytes(error.object)
    return found


def too_large(path: str, group: int, limit_bytes: int) -> str:
    """Returns a message: a row group that does not fit the memory for row groups."""
    return (
        f"{path}: row group {group} takes more memory than the {limit_bytes / 2**20:,.0f} MiB of "
        "data.row_group_cache_mb: allow more, write the file with smaller row groups, or pack it into shards "
        "with `clipship pack`"
    )
