"""Counts what reading costs: requests, bytes, seconds of waiting, and parts that the cache had. No torch.

Each process counts its own, in all of its threads. A loader process sends what it has counted with its next
batch, and the rank adds that to its own.
"""

import time
from collections.abc import Callable, Mapping
from threading import Lock
from typing import NamedTuple


class Reading(NamedTuple):
    """Cost of reading."""

    requests: int = 0
    """Reads of a local file, or requests to a store, those that failed among them."""
    size: int = 0
    """Bytes that came."""
    wait_s: float = 0.0
    """Seconds that threads and processes waited for them, added up."""
    cache_hits: int = 0
    """Parts that `data.cache` had, in place of a request."""
    transparent: int = 0
    """Pictures that were decoded and have transparent parts."""

    def __add__(self, other: "Reading") -> "Reading":  # type: ignore[override]
        return Reading(*(mine + its for mine, its in zip(self, other, strict=True)))  # type: ignore[arg-type]

    @property
    def figures(self) -> dict[str, float]:
        """The cost by its names in metrics.jsonl."""
        return dict(zip(FIGURES, self, strict=False))


FIGURES = ("read_requests", "read_bytes", "read_wait_s", "cache_hits")
NOTHING = Reading()


def of_record(totals: Mapping[str, float]) -> dict[str, float]:
    """Returns the figures for a record from the sums over all ranks; none if they do not count any."""
    return {
        name: round(totals[name], 6) if name.endswith("_s") else int(totals[name])
        for name in FIGURES
        if name in totals
    }


class Tally:
    """Adds up what a process reads."""

    def __init__(self) -> None:
        self._sum, self._adding = Reading(), Lock()

    def add(self, reading: Reading) -> None:
        """Counts something more. Threads may call it."""
        with self._adding:
            self._sum += reading

    def pop(self) -> Reading:
        """Returns what was counted since the last call."""
        with self._adding:
            counted, self._sum = self._sum, Reading()
        return counted


TALLY = Tally()
"""The tally of this process."""


def counted(read: Callable[[int, int], bytes]) -> Callable[[int, int], bytes]:
    """Returns a function that reads from one place to another as `read` does, and counts each call."""

    def reading(begin: int, end: int) -> bytes:
        start, size = time.perf_counter(), 0
        try:
            content = read(begin, end)
            size = len(content)
        finally:
            TALLY.add(Reading(1, size, time.perf_counter() - start))
        return content

    return reading
