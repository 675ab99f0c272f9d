"""Places of samples in files, and the protocol of a source whose samples can be read in blocks.

No torch.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from trainer.data.arena import Arena
from trainer.data.sample import RawSample


class Place(NamedTuple):
    """Places of a sample's members in its file, and how far from there they lie in the arena."""

    path: str
    key: str
    image_at: int
    image_size: int
    text_at: int
    text_size: int
    shift: int | None = None
    """Number to add to a place in the file for that in the arena; None: it is read from the file."""

    @property
    def span(self) -> tuple[int, int]:
        """Places in the file where the sample begins and ends."""
        begin = min(self.image_at, self.text_at)
        return begin, max(self.image_at + self.image_size, self.text_at + self.text_size)


@runtime_checkable
class InBlocks(Protocol):
    """Protocol of a source whose consecutive samples lie one behind the other in a file.

    Threads may call everything but `read_at`.
    """

    def places(self, first: int, count: int) -> Sequence[Place]:
        """Returns the places of consecutive samples of one shard."""

    def is_readable(self, place: Place) -> bool:
        """Returns whether the sample is small enough to be read at all."""

    def bytes_of(self, path: str, begin: int, end: int) -> bytes:
        """Returns a part of a shard.

        Raises StorageError, which names the shard, if it cannot be read, and InputError if it ends too early.
        """

    def gap_bytes(self, path: str) -> int:
        """Returns the largest number of bytes between two samples that are read with them."""

    def read_at(self, place: Place, arena: Arena) -> RawSample:
        """Returns one sample. Raises as `Source.read` does."""
