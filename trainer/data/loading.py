"""Loads what requests ask for, in order, through loader processes; blocks are read ahead of them."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, Protocol, TypeVar

from torch.utils.data import Dataset

from trainer.data.arena import Arena
from trainer.data.blocks import InBlocks
from trainer.data.processes import load
from trainer.data.read_ahead import AHEAD_BYTES, ReadAhead
from trainer.data.sample import Source
from trainer.data.sample_requests import SampleRequest
from trainer.errors import InputError
from trainer.sysinfo.shortage import PREFETCHED

Loaded = TypeVar("Loaded")
_LOOK_S = 0.5
_LOOKS = 10
"""Looks after which who is asked to stop waits no longer for storage."""


class Requests(Protocol):
    """Protocol of the requests of a rank."""

    @property
    def of_a_batch(self) -> int:
        """Number of requests for a batch; a piece is needed until the last of them."""

    def __iter__(self) -> Iterator[SampleRequest]:
        """Yields the requests."""


def loaded(
    source: Source,
    requests: Requests,
    dataset_of: Callable[[Arena | None], Dataset[Loaded | InputError]],
    workers: int,
    *,
    pin_memory: bool = False,
    ahead_bytes: int = AHEAD_BYTES,
) -> Iterator[Loaded]:
    """Yields the answers of a data set to the requests; `dataset_of` makes it.

    Where the source has blocks, `ahead_bytes` are read ahead into the arena that `dataset_of` gets, and each
    request has the places of its samples there. Otherwise it gets None. Raises InputError for samples that
    cannot be read or decoded.
    """
    if not isinstance(source, InBlocks):
        return load(
            dataset_of(None), (request._replace(pieces=None) for request in requests), workers, pin_memory
        )
    ahead = ReadAhead(source, requests, ahead_bytes, requests.of_a_batch, PREFETCHED * workers)
    return _giving_back(load(dataset_of(ahead.arena), ahead, workers, pin_memory), ahead, requests.of_a_batch)


def _giving_back(answers: Iterator[Loaded], ahead: ReadAhead, of_a_batch: int) -> Iterator[Loaded]:
    """Yields the answers, and gives back the blocks that no later one needs."""
    try:
        for number, answer in enumerate(answers, 1):
            if number % of_a_batch == 0:
                ahead.done()
            yield answer
    finally:
        ahead.close()
        del answers  # a traceback would keep it alive, and with it the loader processes


class Ahead(Generic[Loaded]):
    """Items that a thread reads ahead, so that a wait for silent storage can end."""

    def __init__(self, begin: Callable[[], Iterator[Loaded]], ahead: int, stop: Callable[[], bool]) -> None:
        """`begin` returns the items, of which `ahead` are read before they are asked for.

        `stop` says whether this rank is asked to stop.
        """
        self._begin, self._ahead, self._stop = begin, ahead, stop
        self._coming: deque[Future[Loaded | None]] = deque()  # a failed one in a variable would keep itself
        self.missing = False
        """True once an item has not come within 5 s of a request to stop."""

    @property
    def ready(self) -> bool:
        """True if what is read ahead has come."""
        return all(item.done() for item in self._coming)

    def __iter__(self) -> Iterator[Loaded]:
        """Yields the items, up to one that is missing."""
        items, pool = self._begin(), ThreadPoolExecutor(1, "ahead")
        self._coming.extend(pool.submit(next, items, None) for _ in range(self._ahead))
        while self._has_come() and (item := self._coming.popleft().result()) is not None:
            self._coming.append(pool.submit(next, items, None))
            yield item

    def _has_come(self) -> bool:
        looks = 0
        while not self.missing and wait([self._coming[0]], _LOOK_S).not_done:
            looks = looks + 1 if self._stop() else 0
            self.missing = looks > _LOOKS
        return not self.missing
