"""Says what a start reads of Parquet: footers, columns of filters, row groups of the first batch. No torch.

The footers of some files are read as the indexer reads them, and its requests are counted. What else is
read is where they say.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple, cast

from trainer.config import Data
from trainer.config.batch_plan import BatchPlan
from trainer.data.blocks import gap_bytes
from trainer.data.columnar import RowSelection, row_selection
from trainer.data.files import Files, stamp
from trainer.data.hops import Hopping
from trainer.data.index import THREADS
from trainer.data.index_reading import SIZED, IndexReading, Speed
from trainer.data.reading_plan import FirstBatch, fitting_lanes, lanes_of_a_rank
from trainer.data.row_groups import ParquetGroups


class _Group(NamedTuple):
    """Reads of a rank for one row group."""

    rows: int
    requests: int
    size: int
    """Bytes."""


class _Look(NamedTuple):
    """Findings of a look at one file."""

    size: int
    took_s: float
    footer: Sequence[int]
    """Bytes of each request for the footer."""
    asked: Sequence[int]
    """Bytes of each request of the indexer, the footer's among them."""
    groups: Sequence[_Group]

    @classmethod
    def at(cls, path: str, selection: RowSelection) -> "_Look":
        begun = time.perf_counter()
        size, asked, footer = stamp(path).size, list[int](), list[int]()

        def fetch(begin: int, count: int) -> bytes:
            asked.append(count)
            # Behind the footer nothing is fetched: a range has a length and parts, too.
            return cast(bytes, range(count)) if footer else Files().read(path, begin, count)

        file = cast(BinaryIO, Hopping(size, fetch))
        groups = ParquetGroups(file, path)
        footer += asked
        took_s = time.perf_counter() - begun
        numbers = range(len(groups.sizes))
        for begin, end in (
            part for group in numbers for part in groups.parts(group, selection.filter_columns)
        ):
            file.seek(begin)
            file.read(end - begin)
        parts = [groups.parts(group, selection.columns, gap_bytes(path)) for group in numbers]
        sizes = [sum(end - begin for begin, end in of_group) for of_group in parts]
        found = [_Group(*each) for each in zip(groups.sizes, map(len, parts), sizes, strict=True)]
        return cls(size, took_s, footer, asked, found)


class TableReading:
    """Foretells what a start reads of Parquet files, by a look at some of them."""

    def __init__(self, files: Sequence[str], data: Data) -> None:
        self._files, self._data = files, data
        self.what = "footers and filtered columns" if data.filters else "footers"

    @cached_property
    def _looks(self) -> list[_Look]:
        selection, some = row_selection(self._data), self._files[:: -(-len(self._files) // SIZED)]
        with ThreadPoolExecutor(SIZED) as pool:
            return list(pool.map(lambda file: _Look.at(file, selection), some))

    def index(self, missing: Sequence[str], ranks: int, speed: Speed | None) -> IndexReading:
        """Estimates what it takes to index files; `speed` is that of far ones. Raises what reading raises."""
        share = len(missing) / len(self._looks)
        asked = [count for look in self._looks for count in look.asked]
        total, read_bytes = sum(look.size for look in self._looks) * share, sum(asked) * share
        requests = len(asked) * share + len(missing)  # for their sizes
        connections = min(THREADS, -(-len(missing) // ranks))
        took_s: float | None = sum(look.took_s for look in self._looks) * share / connections
        if speed is not None:
            took_s = speed.seconds(requests, read_bytes, connections)
        elif self._data.filters:
            took_s = None  # each row is judged, which is not timed here
        return IndexReading(total, read_bytes, requests, took_s and took_s / min(ranks, len(missing)))

    def first_batch(
        self, batch_plan: BatchPlan, begun: Mapping[str, Any] | None, _samples: int | None
    ) -> FirstBatch:
        """Estimates the row groups of a rank's part of the first batch. Raises what reading raises."""
        groups = [group for look in self._looks for group in look.groups]
        wanted = self._units(groups, batch_plan, begun)
        count = min(wanted, round(len(groups) / len(self._looks) * len(self._files)))
        footers = [count for look in self._looks for count in look.footer]
        opened = min(count, len(self._files)) / len(self._looks)
        return FirstBatch(
            round(sum(group.requests for group in groups) * count / len(groups) + len(footers) * opened),
            round(sum(group.size for group in groups) * count / len(groups) + sum(footers) * opened),
        )

    def _units(self, groups: Sequence[_Group], batch_plan: BatchPlan, begun: Mapping[str, Any] | None) -> int:
        """Returns the number of row groups that a rank's part of the first batch may be of."""
        batch, ranks = batch_plan.global_batch_size, batch_plan.world_size
        if (begun or {"order": self._data.order})["order"] == "window":
            return batch_plan.batch_size_per_rank
        largest = max(group.rows for group in groups)
        row_bytes = sum(look.size for look in self._looks) / max(1, sum(group.rows for group in groups))
        lanes = (
            begun["lanes"]
            if begun
            else fitting_lanes(batch, ranks, largest * row_bytes, self._data.row_group_cache_mb * 2**20)
        )
        return lanes_of_a_rank(batch, ranks, lanes)
