"""Reads the blocks of a rank's samples ahead of its loader processes: each once, whole, several at a time.

Threads of the rank read, since they wait for storage most of the time; the loader processes take the samples
out of the `Arena`. A piece of a block is read when the order comes near to it, and its memory is given back
when the batches that need it have come. No torch.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from trainer.data.arena import Arena
from trainer.data.blocks import Block, InBlocks
from trainer.data.reading_plan import CONNECTIONS
from trainer.data.train_requests import TrainRequest
from trainer.errors import InputError

AHEAD_BYTES = CONNECTIONS * 2**22
"""Bytes that are read ahead of their first use by default: as many blocks as there are connections."""
MOST_REQUESTS = 256
"""Micro-batches that the order is looked ahead at most, however small their blocks are."""
USUAL_BYTES = 2**17
"""Size of a sample before any has been read."""


class ReadAhead:
    """A rank's requests, each with the places of its samples, which are in the arena by then.

    About `ahead_bytes` are read before their first sample is asked for, and always what the next request
    needs.
    """

    def __init__(
        self, source: InBlocks, requests: Iterable[TrainRequest], ahead_bytes: int = AHEAD_BYTES
    ) -> None:
        self.arena = Arena()
        self._source, self._requests, self._ahead_bytes = source, requests, ahead_bytes
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="blocks")
        self._held: dict[tuple[int, int], Future[Block]] = {}
        """Pieces that are read or being read, by epoch and number."""
        self._waiting: dict[tuple[int, int], int] = {}
        """Samples of those that no request has come to yet."""
        self._last_uses: list[tuple[int, int, int]] = []
        """Epoch, last batch and number of each piece, as a heap."""
        self._read_samples, self._read_bytes = 1, USUAL_BYTES

    def __iter__(self) -> Iterator[TrainRequest]:
        upcoming = iter(self._requests)
        ahead: deque[TrainRequest] = deque()
        while True:
            while self._wants(len(ahead)) and (request := next(upcoming, None)) is not None:
                self._begin(request)
                ahead.append(request)
            if not ahead:
                return
            yield self._placed(ahead.popleft())

    def done(self, epoch: int, batch: int) -> None:
        """Gives back the memory of pieces that no batch after this one needs; its own samples have come."""
        while self._last_uses and self._last_uses[0][:2] <= (epoch, batch):
            of_epoch, _, number = heapq.heappop(self._last_uses)
            for kept in self._held.pop((of_epoch, number)).result().ranges:
                self.arena.free(kept)

    def close(self) -> None:
        """Ends the threads, as soon as they have what they are reading."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _wants(self, requests: int) -> bool:
        """Returns whether to look further ahead than the requests that are begun and have not been given."""
        if not requests or requests >= MOST_REQUESTS:
            return not requests
        return sum(self._waiting.values()) * self._read_bytes / self._read_samples < self._ahead_bytes

    def _begin(self, request: TrainRequest) -> None:
        """Begins to read the pieces that the request is the first to need."""
        assert request.pieces is not None
        for number, first, count, last in zip(*(part.tolist() for part in request.pieces[:4]), strict=True):
            key = (request.epoch, number)
            if key not in self._held:
                self._held[key] = self._pool.submit(self._read, first, count)
                self._waiting[key] = count
                heapq.heappush(self._last_uses, (request.epoch, last, number))

    def _placed(self, request: TrainRequest) -> TrainRequest:
        """Returns the request with the places of its samples, as soon as these have been read.

        It carries the problem of samples that cannot be: the batches before it still come.
        """
        assert request.pieces is not None
        numbers, firsts = request.pieces.numbers.tolist(), request.pieces.firsts.tolist()
        places = []
        for number, first, sample in zip(numbers, firsts, request.samples.tolist(), strict=True):
            key = (request.epoch, number)
            self._waiting.pop(key, None)
            try:
                places.append(self._held[key].result().places[sample - first])
            except InputError as error:
                return request._replace(pieces=None, problem=error)
        return request._replace(pieces=None, places=places)

    def _read(self, first: int, count: int) -> Block:
        """Reads a piece into the arena; a thread runs it."""
        block = self._source.read_block(first, count, self.arena)
        self._read_samples += count
        self._read_bytes += block.size
        return block
