"""Processor time of each part of our loader: `python -m benchmarks.data_parts PATTERN BATCHES`.

Prints microseconds a sample as JSON. In turns: a batch is made in this process; it is made again, with a
clock at each part; simplejpeg alone decodes its images at full size ("decoder"); and a loader process makes a
batch. Its processor time and the rank's ("sum"), less that of a batch made here, is what lies between
the processes.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import simplejpeg
import torch
from open_clip import get_tokenizer

from trainer.config import Data
from trainer.config.batch_plan import BatchPlan
from trainer.data import pixels as pixels_module
from trainer.data import processes
from trainer.data.captions import random_caption
from trainer.data.lanes import Lanes
from trainer.data.loader import TrainBatches, train_batches
from trainer.data.pixels import RandomCrop
from trainer.data.processes import BufferPool
from trainer.data.sample_requests import SampleRequest, TrainRequests
from trainer.data.shards import ShardSource
from trainer.data.source import open_source
from trainer.data.tokens import QuickTokenizer, quick

BATCH, WARM_UP = 64, 4
DECODE = "decode"
PLACES: tuple[tuple[Any, str, str], ...] = (
    (ShardSource, "read", "index and shards"),
    (pixels_module, "upright_jpeg", "choose the crop"),
    (RandomCrop, "box", "choose the crop"),
    (simplejpeg, "decode_jpeg_header", "choose the crop"),
    (pixels_module, "decoded_jpeg", DECODE),
    (np, "ascontiguousarray", "cut"),
    (pixels_module, "resize_into", "resize into the batch"),
    (QuickTokenizer, "__call__", "tokens"),
)
"""The functions of each part: owner, name and part."""
ORDER, REST, BETWEEN, SUM, DECODER = (
    "order of the epoch", "rest of a batch", "between processes", "sum", "decoder"
)  # fmt: skip
IDLE_S = 0.15
"""Seconds in which a loader process that uses no processor time counts as waiting."""


@contextmanager
def timed(batch: dict[str, float]) -> Iterator[list[bytes]]:
    """Adds the processor time of the functions of PLACES to their parts, in seconds.

    They run in their places, since the caches hold something else where a call is made again. Yields a list
    to which the images that were decoded are appended.
    """
    images: list[bytes] = []

    def timer(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if part == DECODE:
                images.append(arguments[0])
            start = time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                batch[part] += time.process_time() - start

        return call

    with ExitStack() as stack:
        for owner, name, part in PLACES:
            stack.enter_context(patch.object(owner, name, timer(part, getattr(owner, name))))
        yield images


def measured(pattern: str, batches: int, samples: int = BATCH) -> dict[str, float]:
    """Returns microseconds a sample by part: medians over the turns, one for each batch of `samples`."""
    # This process fills the memory that a loader process would.
    with patch.object(processes, "_pools", [BufferPool(-1, 0)]):
        sides = Sides(pattern, samples)
        for _ in range(WARM_UP):
            sides.loaded()
            sides.made()
        begun = ended = _when_idle()
        rank, turns = 0.0, []
        for _ in range(batches):
            turns.append(_turn(sides))
            rank += _spent(sides.loaded)
            ended = _when_idle()  # else the loader process would take the caches from what is timed next
    found = {part: statistics.median(turn[part] for turn in turns) / samples for part in turns[0]}
    decoder = found.pop(DECODER)
    loaded = (rank + ended - begun) / batches / samples
    found |= {BETWEEN: loaded - sum(found.values()), SUM: loaded, DECODER: decoder}
    return {part: value * 1e6 for part, value in found.items()}


class Sides:
    """The two ways to a batch: a loader process, and this process."""

    def __init__(self, pattern: str, samples: int) -> None:
        source, plan = open_source(Data(train=(pattern,))), BatchPlan(1, samples, samples, samples, 1)
        order = Lanes(105, samples)
        crop, tokenizer = RandomCrop((224, 224)), quick(get_tokenizer("ViT-B-32"))
        self._stream = train_batches(
            source, plan=plan, rank=0, seed=0, order=order, pixels=crop, tokenizer=tokenizer, workers=1
        )
        self._requests = iter(
            TrainRequests(source.shard_sizes(), None, plan, 0, 0, order, len(source) // samples, None, 0, 0)
        )
        self._data = TrainBatches(source, 0, crop, tokenizer, skip_bad=False, caption_choice=random_caption)

    def loaded(self) -> object:
        """Takes a batch from the loader process."""
        return next(self._stream)

    def request(self) -> SampleRequest:
        """Makes the next request."""
        return next(self._requests)

    def made(self, request: SampleRequest | None = None) -> object:
        """Makes the batch of a request, the next one by default, in this process."""
        return self._data[request or self.request()]


def _turn(sides: Sides) -> dict[str, float]:
    """Returns the processor time in seconds of each part of one batch."""
    requests: list[SampleRequest] = []
    turn = {ORDER: _spent(lambda: requests.append(sides.request()))}
    whole = _spent(lambda: sides.made(requests[0]))
    parts = dict.fromkeys((part for _, _, part in PLACES), 0.0)
    with timed(parts) as images:
        sides.made(requests[0])
    turn |= parts
    turn[REST] = whole - sum(parts.values())
    turn[DECODER] = sum(_spent(partial(simplejpeg.decode_jpeg, image)) for image in images)
    return turn


def _spent(work: Callable[[], object]) -> float:
    """Returns the processor time of this process in seconds."""
    start = time.process_time()
    work()
    return time.process_time() - start


def _when_idle() -> float:
    """Returns the processor time of the loader processes in seconds, once they have nothing to do."""
    spent = _children()
    while True:
        time.sleep(IDLE_S)
        if (now := _children()) == spent:
            return now
        spent = now


def _children() -> float:
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return float(sum(spent.user + spent.system for spent in times))


if __name__ == "__main__":
    processes.start_process_server()
    torch.set_num_threads(1)
    print(json.dumps(measured(sys.argv[1], int(sys.argv[2]))))
    sys.stdout.flush()
    os._exit(0)
