"""Types for the contents of a file of samples, and the protocol of what finds them. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, BinaryIO, NamedTuple, Protocol

from pydantic import Field

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""Number of bytes or of things, within what any file has where a file says it."""


@dataclass(frozen=True)
class Entry:
    """Counts of a file's contents, as the catalogue of an index has them."""

    size: Count
    """Bytes of the file, and its time of change, when it was indexed; 0 and empty in an index in memory."""
    changed: str
    samples: Count
    digest: str
    """Digest of what is stored of the samples; empty in an index in memory."""
    left_out: Mapping[str, Count]
    """Samples that cannot be used, counted by cause."""
    endings: Mapping[str, Count]
    """All members of a shard, counted by ending."""
    flaws: Sequence[tuple[str, str]] = ()
    """Keys and causes of the first samples that were left out."""
    damage: str = ""
    """Reason why nothing can be read after these samples; empty if the file was read to its end."""
    lost: Count = 0
    """Estimate of the samples after the damage, if they are as large as those before it; 0 if nothing
    follows.
    """
    filtered: Mapping[str, Count] = field(default_factory=dict)
    """Samples that a filter has left out, counted by it."""
    groups: Sequence[Count] = ()
    """Samples of each row group, if the file has row groups."""

    def __len__(self) -> int:
        return self.samples


class Content(NamedTuple):
    """Contents of a file, as they were found."""

    entry: Entry
    payload: Sequence[bytes]
    """The bytes that an index stores of the samples, in parts."""
    whole: bool = True
    """False if reading stopped before the end because enough was read."""


class Selects(Protocol):
    """Says which samples of a file an index has, and finds them."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Values by which an index knows it."""

    def scan(self, file: BinaryIO, path: str) -> Content:
        """Returns what the file holds. Raises OSError if reading fails, and InputError, which names it."""
