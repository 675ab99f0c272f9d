"""Table of how each format of training data is read. Imports a format's code when it is needed.

A command that only checks shards thus imports no numpy. No torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from trainer.config import Data

if TYPE_CHECKING:
    from trainer.data.bad_samples import Allowed
    from trainer.data.entry import Selects
    from trainer.data.index import Index
    from trainer.data.sample import Source
    from trainer.data.tables import Table

Progress = Callable[[int, int], None]
"""Is called with (files done, files) while files are indexed."""


class Format(ABC):
    """One format."""

    @abstractmethod
    def check(self, files: Sequence[str], data: Data, key: str) -> int | None:
        """Returns the number of samples, or None if they are not counted yet.

        Raises InputError, which lists every problem of the files. The key named the files.
        """

    @abstractmethod
    def source(self, data: Data, allowed: "Allowed", progress: Progress | None = None) -> "Source":
        """Opens the samples for training."""

    @abstractmethod
    def images(self, data: Data, progress: Progress | None = None) -> "Source":
        """Opens the samples for evaluation: each image once, with all captions."""

    def captions(self, file: str, data: Data) -> Iterator[str]:
        """Yields the captions of a file from its beginning, without its images."""
        yield from ()

    def groups(self, file: str, data: Data) -> Iterator[int]:
        """Yields the number of each sample's group, as `captions` does; a sample with a bad id has none."""
        yield from ()

    def selection(self, data: Data) -> "Selects | None":
        """Returns what an index has of the files; None for a format that is read without one."""
        return None

    def indexed(self, index: "Index", data: Data, allowed: "Allowed") -> "Source":
        """Opens the samples for training through an index."""
        raise NotImplementedError


class _Indexed(Format):
    """A format that is always read through an index, which is made here if the job has none."""

    @abstractmethod
    def selection(self, data: Data) -> "Selects": ...

    def source(self, data: Data, allowed: "Allowed", progress: Progress | None = None) -> "Source":
        from trainer.data.indexed import index_in_memory
        from trainer.data.shard_names import expand_shards

        index = index_in_memory(expand_shards(data.train), self.selection(data), progress)
        return self.indexed(index, data, allowed)


class _Shards(_Indexed):
    def check(self, files: Sequence[str], data: Data, key: str) -> int | None:
        from trainer.data.sample_counts import check_shards

        return check_shards(files, data, key)

    def captions(self, file: str, data: Data) -> Iterator[str]:
        from trainer.data.first_look import captions_of_shard

        return captions_of_shard(file, data)

    def groups(self, file: str, data: Data) -> Iterator[int]:
        from trainer.data.first_look import groups_of_shard

        return groups_of_shard(file, data)

    def selection(self, data: Data) -> "Selects":
        from trainer.data.shards import shard_selection

        return shard_selection(data)

    def indexed(self, index: "Index", data: Data, allowed: "Allowed") -> "Source":
        from trainer.data.block_cache import cache_of
        from trainer.data.captions import CaptionReader
        from trainer.data.shards import open_indexed, shard_selection

        selection, captions = shard_selection(data), CaptionReader.by(data)
        source = open_indexed(index, selection, "captions", allowed, data.max_member_bytes, captions)
        source.reader.cache = cache_of(data)
        return source

    def images(self, data: Data, progress: Progress | None = None) -> "Source":
        from trainer.data.bad_samples import Allowed

        return self.source(data, Allowed.by(data), progress)


class _Tables(Format):
    def check(self, files: Sequence[str], data: Data, key: str) -> int:
        from trainer.data.tables import check_tables

        return check_tables(files, data, key)

    def captions(self, file: str, data: Data) -> Iterator[str]:
        from trainer.data.tables import captions_of_table

        return captions_of_table(file, data)

    def groups(self, file: str, data: Data) -> Iterator[int]:
        from trainer.data.tables import TableColumns, read_table

        return iter(read_table(file, TableColumns.by(data)).groups)

    def source(self, data: Data, allowed: "Allowed", progress: Progress | None = None) -> "Source":
        from trainer.data.tables import TableSource

        return TableSource(self._read(data, allowed), data.max_member_bytes)

    def images(self, data: Data, progress: Progress | None = None) -> "Source":
        from trainer.data.bad_samples import Allowed
        from trainer.data.tables import by_image

        return by_image(self._read(data, Allowed.by(data)), data.max_member_bytes)

    def _read(self, data: Data, allowed: "Allowed") -> "list[Table]":
        from trainer.data.shard_names import expand_shards
        from trainer.data.tables import TableColumns, left_out_of, read_table

        read = [read_table(file, TableColumns.by(data)) for file in expand_shards(data.train)]
        allowed.check(left_out_of(read), sum(len(table.rows) for table in read))
        return read


class _RowGroups(_Indexed):
    """Tables in row groups: Parquet and Arrow."""

    def check(self, files: Sequence[str], data: Data, key: str) -> int | None:
        from trainer.data.columnar import check_row_groups

        return check_row_groups(files, data)

    def captions(self, file: str, data: Data) -> Iterator[str]:
        from trainer.data.columnar import captions_of_groups

        return captions_of_groups(file, data)

    def groups(self, file: str, data: Data) -> Iterator[int]:
        from trainer.data.columnar import numbers_of_groups

        return numbers_of_groups(file, data)

    def selection(self, data: Data) -> "Selects":
        from trainer.data.columnar import row_selection

        return row_selection(data)

    def indexed(self, index: "Index", data: Data, allowed: "Allowed") -> "Source":
        from trainer.data.columnar import open_columnar

        return open_columnar(index, data, allowed)

    def images(self, data: Data, progress: Progress | None = None) -> "Source":
        from trainer.data.columnar import row_groups_by_image

        return row_groups_by_image(data, progress)


class _Synthetic(Format):
    def check(self, files: Sequence[str], data: Data, key: str) -> int:
        return data.synthetic_samples

    def source(self, data: Data, allowed: "Allowed", progress: Progress | None = None) -> "Source":
        return self.images(data)

    def images(self, data: Data, progress: Progress | None = None) -> "Source":
        from trainer.data.synthetic import SyntheticSource

        return SyntheticSource(data.synthetic_samples)


_ROW_GROUPS = _RowGroups()
READERS: dict[str, Format] = {
    "webdataset": _Shards(),
    "table": _Tables(),
    "parquet": _ROW_GROUPS,
    "arrow": _ROW_GROUPS,
    "synthetic": _Synthetic(),
}
"""Every format of `trainer.config.formats`, by its name."""
