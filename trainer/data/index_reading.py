"""Says what indexing shards reads, by a look at the beginning of one of them. No torch.

The look writes down where the indexer reads. Of far shards its reader (`hops.py`) then goes through a shard
that is like that beginning, and what it would ask for is counted.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

from trainer.config import Job, is_remote
from trainer.config.batch_plan import BatchPlan
from trainer.data.files import Files, open_file, stamp
from trainer.data.hops import Hopping
from trainer.data.index import THREADS
from trainer.data.reading_plan import FirstBatch, first_batch
from trainer.data.shards import shard_selection
from trainer.data.tar import Selection, read_headers

SIZED = 16
"""Shards whose sizes are asked for; the others count as their mean."""
_KEYS = 128
_REQUESTS = 16
"""Keys, and requests, after which a look ends."""
_READS = 200_000
"""Reads that are counted at most, which takes some tenths of a second."""
_ANSWER_BYTES = 2**22
"""Bytes by which the speed of a connection is judged."""


class Speed(NamedTuple):
    """Speed of a connection to the storage of a shard."""

    wait_s: float
    """Seconds to the answer to a request for nothing."""
    bytes_per_s: float

    @classmethod
    def of(cls, shard: str) -> "Speed":
        """Measures it with two requests, after one that opens the connection. Raises what `stamp` raises."""
        size = min(stamp(shard).size, _ANSWER_BYTES)
        begun = time.perf_counter()
        stamp(shard)
        answered = time.perf_counter()
        Files().read(shard, 0, size)
        wait_s, took_s = answered - begun, time.perf_counter() - answered
        return cls(wait_s, size / max(took_s - wait_s, took_s / 10))

    def seconds(self, requests: float, read_bytes: float, connections: int) -> float:
        """Returns the seconds that so many connections take."""
        return (requests * self.wait_s + read_bytes / self.bytes_per_s) / connections


class IndexReading(NamedTuple):
    """Estimate of what it takes to index shards."""

    total_bytes: float
    """Size of the shards."""
    read_bytes: float
    requests: float
    """Both are 0 for local shards, of which only headers are read."""
    seconds: float | None
    """Time on all ranks, if their machines are like this one; None if it is not known."""


class StartReading(Protocol):
    """Protocol of what foretells what a start reads of the files of one format."""

    what: str
    """Parts of the files that are read for an index."""

    def index(self, missing: Sequence[str], ranks: int, speed: Speed | None) -> IndexReading:
        """Estimates what it takes to index files; `speed` is that of far ones, None for local ones.

        Raises what reading raises.
        """

    def first_batch(
        self, batch_plan: BatchPlan, begun: Mapping[str, Any] | None, samples: int | None
    ) -> FirstBatch:
        """Estimates a rank's reads for the first batch; the arguments are those of `reading_rows`.

        Raises what reading raises.
        """


def index_reading(
    shards: Sequence[str], selection: Selection, ranks: int, speed: Speed | None
) -> IndexReading:
    """Estimates it; `speed` is that of far shards, None for local ones. Raises what reading raises."""
    with ThreadPoolExecutor(SIZED) as pool:
        sizes = [found.size for found in pool.map(stamp, shards[:: -(-len(shards) // SIZED)])]
    total, first = sum(sizes) / len(sizes) * len(shards), sizes[0]
    look = _Look.at(shards[0], first, selection)
    connections = min(THREADS, -(-len(shards) // ranks))
    requests = read_bytes = 0.0
    waiting_s = look.wait_s * total / connections
    if speed is not None:
        requests, read_bytes = (count * total for count in look.of_each_byte(first))
        requests += len(shards)  # for their sizes
        waiting_s = speed.seconds(requests, read_bytes, connections)
    # Threads wait together, but share a core.
    return IndexReading(
        total, read_bytes, requests, max(look.cpu_s * total, waiting_s) / min(ranks, len(shards))
    )


class ShardReading:
    """Foretells what a start reads of shards."""

    what = "headers"

    def __init__(self, job: Job) -> None:
        self._job = job

    def index(self, missing: Sequence[str], ranks: int, speed: Speed | None) -> IndexReading:
        """Estimates what it takes to index shards, as `index_reading` does."""
        return index_reading(missing, shard_selection(self._job.data), ranks, speed)

    def first_batch(
        self, batch_plan: BatchPlan, begun: Mapping[str, Any] | None, samples: int | None
    ) -> FirstBatch:
        """Returns the blocks of a rank's part of the first batch."""
        return first_batch(self._job, batch_plan, begun, samples)


class _Look(NamedTuple):
    """Reads of the indexer at the beginning of a shard, and their cost."""

    reads: Sequence[tuple[int, int]]
    """Place and size of each read of the indexer."""
    span: int
    """Bytes of the beginning."""
    cpu_s: float
    wait_s: float
    """Seconds for each byte of the shard, of the processor's and of others."""

    @classmethod
    def at(cls, shard: str, size: int, selection: Selection) -> "_Look":
        asked = 0

        def fetch(begin: int, count: int) -> bytes:
            nonlocal asked
            asked += 1
            if asked > _REQUESTS:
                raise _Enough
            return Files().read(shard, begin, count)

        content = cast(BinaryIO, Hopping(size, fetch)) if is_remote(shard) else open_file(shard)
        with closing(content):
            file = _WrittenDown(content)
            begun, used = time.perf_counter(), time.process_time()
            whole = False
            with suppress(_Enough):
                whole = read_headers(cast(BinaryIO, file), selection, _KEYS).whole
            used, took = time.process_time() - used, time.perf_counter() - begun
        span = max(1, size if whole else max(place for place, _ in file.reads))
        reads = [read for read in file.reads if read[0] < span]
        return cls(reads, span, used / span, max(0.0, took - used) / span)

    def of_each_byte(self, size: int) -> tuple[float, float]:
        """Returns requests and bytes that are read for each byte of a far shard of that size."""
        size = min(size, self.span * max(1, _READS // len(self.reads)))
        fetched: list[int] = []

        def fetch(begin: int, count: int) -> bytes:
            fetched.append(count)
            return bytes(count)

        file = Hopping(size, fetch)
        for start in range(0, size, self.span):
            for place, count in self.reads:
                file.seek(start + place)
                file.read(count)
        return len(fetched) / size, sum(fetched) / size


class _Enough(Exception):
    """Ends a look."""


class _WrittenDown:
    """A file whose reads are written down."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell
        self.reads: list[tuple[int, int]] = []

    def read(self, size: int) -> bytes:
        self.reads.append((self.tell(), size))
        return self._file.read(size)
