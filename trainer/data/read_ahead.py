"""Reads the blocks of a rank's samples ahead of its loader processes: each once, whole, several at a time.

Threads of the rank read, since they wait for storage most of the time; the loader processes take the samples
out of the `Arena`. A block is read when the order comes near to a piece of it, and its memory is given back
when the batches that need it have come. A row group, which is decoded as a whole, is one block for several
pieces, and stays as long as there is room. No torch.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from trainer.data.arena import Arena
from trainer.data.blocks import Block, InBlocks
from trainer.data.reading_plan import CONNECTIONS
from trainer.data.sample_requests import SampleRequest
from trainer.errors import InputError

AHEAD_BYTES = CONNECTIONS * 2**22
"""Bytes that are read ahead of their first use by default: as many blocks as there are connections."""
MOST_REQUESTS = 256
"""Micro-batches that the order is looked ahead at most, however small their blocks are."""
USUAL_BYTES = 2**17
"""Size of a sample before any has been read."""


@dataclass
class _Held:
    """A block that is read or being read."""

    block: Future[Block]
    pieces: int = 0
    """Pieces for which it is needed now."""


class ReadAhead:
    """A rank's requests, each with the places of its samples, which are in the arena by then.

    About `ahead_bytes` are read before their first sample is asked for, and always what the requests need
    that the loader works on at once, and the next. As long as a batch is on its way, None is given in place
    of a request that is still being read: a loader that waited for it would withhold that batch.
    """

    def __init__(
        self,
        source: InBlocks,
        requests: Iterable[SampleRequest],
        ahead_bytes: int = AHEAD_BYTES,
        of_a_batch: int = 1,
        at_once: int = 0,
    ) -> None:
        """`of_a_batch` is the number of requests for a batch; the loader works on `at_once` requests."""
        self.arena = Arena()
        self._source, self._requests, self._ahead_bytes = source, requests, ahead_bytes
        self._of_a_batch, self._at_once = of_a_batch, at_once
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="blocks")
        self._held: dict[tuple[int, int], _Held] = {}
        """Blocks by first sample and number of samples."""
        self._unused: dict[tuple[int, int], Block] = {}
        """Those that nothing needs now; what was used last comes last."""
        self._pieces: dict[tuple[int, int], tuple[int, int]] = {}
        """Block of each piece that is needed, by epoch and number of the piece."""
        self._given: deque[tuple[int, int]] = deque()
        """Epoch and number of the batches whose requests were all given and that are not done."""
        self._waiting: dict[tuple[int, int], int] = {}
        """Samples that were read for pieces to which no request has come yet."""
        self._last_uses: list[tuple[int, int, int]] = []
        """Epoch, last batch and number of each piece, as a heap."""
        self._read_samples, self._read_bytes = 1, USUAL_BYTES

    def __iter__(self) -> Iterator[SampleRequest | None]:
        upcoming = iter(self._requests)
        ahead: deque[SampleRequest] = deque()
        while True:
            while self._wants(len(ahead)) and (request := next(upcoming, None)) is not None:
                self._begin(request)
                ahead.append(request)
            if not ahead:
                return
            if self._given and not self._is_read(ahead[0]):
                yield None
                continue
            request = self._placed(ahead.popleft())
            if request.micro_batch + 1 == self._of_a_batch:
                self._given.append((request.epoch, request.batch_in_epoch))
            yield request

    def done(self) -> None:
        """Gives back what only the first batch needed that is not done: all of its samples have come."""
        batch = self._given.popleft()
        while self._last_uses and self._last_uses[0][:2] <= batch:
            of_epoch, _, number = heapq.heappop(self._last_uses)
            key = self._pieces.pop((of_epoch, number))
            self._held[key].pieces -= 1
            if not self._held[key].pieces:
                self._unused[key] = self._held[key].block.result()
        if self._unused:
            self._trim()

    def close(self) -> None:
        """Ends the threads, as soon as they have what they are reading."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _wants(self, requests: int) -> bool:
        """Returns whether to look further ahead than the requests that are begun and have not been given."""
        if not requests or requests >= MOST_REQUESTS:
            return not requests
        if len(self._given) * self._of_a_batch + requests < self._at_once:
            return True
        return sum(self._waiting.values()) * self._read_bytes / self._read_samples < self._ahead_bytes

    def _begin(self, request: SampleRequest) -> None:
        """Begins to read the pieces that the request is the first to need."""
        assert request.pieces is not None
        for number, first, count, last in zip(*(part.tolist() for part in request.pieces[:4]), strict=True):
            piece = (request.epoch, number)
            if piece in self._pieces:
                continue
            key = self._pieces[piece] = self._source.block_of(first, count)
            if key not in self._held:
                self._held[key] = _Held(self._pool.submit(self._read, *key))
                self._waiting[piece] = key[1]
            self._held[key].pieces += 1
            self._unused.pop(key, None)
            heapq.heappush(self._last_uses, (request.epoch, last, number))

    def _trim(self) -> None:
        """Gives back the memory of blocks that nothing needs, but for as many as the source keeps."""
        most, size = self._source.keep_bytes, 0
        if most:
            blocks = (held.block for held in self._held.values() if held.block.done())
            size = sum(block.result().size for block in blocks if not block.exception())
        for key, block in list(self._unused.items()):
            if most and size <= most:
                return
            size -= block.size
            del self._held[key], self._unused[key]
            for kept in block.ranges:
                self.arena.free(kept)

    def _is_read(self, request: SampleRequest) -> bool:
        assert request.pieces is not None
        pieces = {(request.epoch, number) for number in request.pieces.numbers.tolist()}
        return all(self._held[self._pieces[piece]].block.done() for piece in pieces)

    def _placed(self, request: SampleRequest) -> SampleRequest:
        """Returns the request with the places of its samples, as soon as these have been read.

        It carries the problem of samples that cannot be: the batches before it still come.
        """
        assert request.pieces is not None
        places = []
        for number, sample in zip(request.pieces.numbers.tolist(), request.samples.tolist(), strict=True):
            piece = (request.epoch, number)
            self._waiting.pop(piece, None)
            key = self._pieces[piece]
            try:
                places.append(self._held[key].block.result().places[sample - key[0]])
            except InputError as error:
                return request._replace(pieces=None, problem=error)
        return request._replace(pieces=None, places=places)

    def _read(self, first: int, count: int) -> Block:
        """Reads a block into the arena; a thread runs it."""
        block = self._source.read_block(first, count, self.arena)
        self._read_samples += count
        self._read_bytes += block.size
        return block
