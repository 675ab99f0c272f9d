"""Reads blocks of files: one reader for shards and row groups, and the protocol of what is read in blocks.

No torch.
"""

from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol, cast, runtime_checkable

from trainer.config import is_remote
from trainer.data.arena import Arena, Kept
from trainer.data.block_cache import BlockCache
from trainer.data.changed import Versions
from trainer.data.files import Files, persistent, stamp
from trainer.data.hops import Hopping
from trainer.data.index import Index
from trainer.data.sample import RawSample, Source

LOCAL_GAP, REMOTE_GAP = 2**18, 2**20
"""Largest number of bytes between parts that are read with them; more is skipped by a second read."""


def gap_bytes(path: str) -> int:
    """Returns the largest number of bytes between two parts of a file that are read with them."""
    return REMOTE_GAP if is_remote(path) else LOCAL_GAP


class Block(NamedTuple):
    """Consecutive samples of one shard that lie in an arena."""

    places: Sequence[Any]
    """Place of each sample, which `InBlocks.read_at` takes."""
    ranges: Sequence[Kept]
    size: int
    """Bytes that they take there."""


@runtime_checkable
class InBlocks(Protocol):
    """Protocol of a source whose consecutive samples are read together."""

    keep_bytes: int
    """Memory up to which blocks are kept that nothing needs now; they may be needed again."""

    def block_of(self, first: int, count: int) -> tuple[int, int]:
        """Returns the first sample and the number of those that are read with these, and share a block."""

    def read_block(self, first: int, count: int, arena: Arena) -> Block:
        """Reads consecutive samples of one shard into the arena; threads call it.

        Raises StorageError, which names the file, if it cannot be read, and InputError if it ends too early.
        """

    def read_at(self, place: Any, arena: Arena) -> RawSample:
        """Returns one sample. Raises as `Source.read` does."""


def read_sample(source: Source, sample: int, place: Any, arena: Arena | None) -> RawSample:
    """Returns a sample, from the arena if its place there is known. Raises as `Source.read` does."""
    if place is None or arena is None:
        return source.read(sample)
    return cast(InBlocks, source).read_at(place, arena)


class BlockReader:
    """Reads parts of the files of an index, from the cache of the node if there is one."""

    def __init__(self, index: Index) -> None:
        self._index, self._versions = index, Versions(index)
        self.cache: BlockCache | None = None
        """Cache of what is read; None if nothing is kept."""

    def bytes_of(self, path: str, begin: int, end: int) -> bytes:
        """Returns a part of a file, which is open for this read alone; threads may call it.

        Raises as `Files.read` does, and InputError for a local file that has changed since it was indexed.
        """
        if self.cache is None:
            return self._read(path, begin, end)
        version = self._versions.of(path)
        return self.cache.read(path, version, begin, end, lambda at, behind: self._read(path, at, behind))

    def _read(self, path: str, begin: int, end: int) -> bytes:
        content = Files().read(path, begin, end - begin)
        if not is_remote(path):  # elsewhere a look would be a request more
            self._versions.check(path, persistent(path, lambda: stamp(path), was_there=True))
        return content

    def file(self, path: str) -> BinaryIO:
        """Returns a file whose reads go this way, each by itself."""
        size = self._versions.of(path).size
        return cast(
            BinaryIO,
            Hopping(size, lambda begin, count: self.bytes_of(path, begin, begin + count), ahead=False),
        )

    def __reduce__(self) -> tuple[type["BlockReader"], tuple[Index]]:
        return BlockReader, (self._index,)  # only the rank reads ahead
