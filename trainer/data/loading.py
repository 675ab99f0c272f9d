"""Loads what requests ask for, in order, through loader processes; blocks are read ahead of them."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Protocol, TypeVar

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


def has_come(answer: Future[Loaded], stop: Callable[[], bool]) -> bool:
    """Waits for what a thread reads; returns False where it has not come within 5 s of a request to stop."""
    looks = 0
    while wait([answer], _LOOK_S).not_done:
        looks = looks + 1 if stop() else 0
        if looks > _LOOKS:
            return False
    return True
