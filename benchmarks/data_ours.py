"""Our loader, and the decoder alone, on shards.

`python -m benchmarks.data_ours loader|loader2|decoder PATTERN BATCHES` prints images per second, by the wall
clock and of processor time.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import psutil
import simplejpeg
from open_clip import get_tokenizer

from trainer.config import Data
from trainer.config.batch_plan import BatchPlan
from trainer.data.lanes import Lanes
from trainer.data.loader import Batch, Pixels, train_batches
from trainer.data.pixels import RandomCrop
from trainer.data.read_ahead import AHEAD_BYTES
from trainer.data.source import Source, open_source
from trainer.data.tokens import quick

BATCH, WARM_UP = 64, 2
ORDER, PIXELS = Lanes(105, BATCH), RandomCrop((224, 224))


Rates = tuple[float, float]


def batches_of(
    source: Source,
    workers: int,
    epochs: int | None = None,
    pixels: Pixels = PIXELS,
    order: Lanes = ORDER,
    ahead_bytes: int = AHEAD_BYTES,
) -> Iterator[Batch]:
    """Yields batches as a training loop takes them from loader processes."""
    return train_batches(
        source,
        plan=BatchPlan(1, BATCH, BATCH, BATCH, 1),
        rank=0,
        seed=0,
        order=order,
        pixels=pixels,
        tokenizer=quick(get_tokenizer("ViT-B-32")),
        workers=workers,
        epochs=epochs,
        ahead_bytes=ahead_bytes,
    )


def loader(pattern: str, batches: int, workers: int = 1) -> Rates:
    """Batches of shards from loader processes."""
    stream = batches_of(open_source(Data(train=(pattern,))), workers)
    for _ in range(WARM_UP * workers):
        next(stream)
    start, used = time.perf_counter(), processor_time()
    for _ in range(batches):
        assert next(stream).images.shape == (BATCH, 4, 224, 224)
    return rates(BATCH * batches, start, used)


def decoder(pattern: str, batches: int) -> Rates:
    """simplejpeg at full size, in one process, on bytes in memory."""
    source = open_source(Data(train=(pattern,)))
    images = [source.read(number).image for number in range(min(len(source), BATCH * batches))]
    start, used = time.perf_counter(), processor_time()
    for image in images:
        simplejpeg.decode_jpeg(image)
    return rates(len(images), start, used)


def rates(images: int, start: float, used: float) -> Rates:
    return images / (time.perf_counter() - start), images / (processor_time() - used)


def processor_time() -> float:
    """Seconds of this process and of the processes that load for it."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return float(sum(spent.user + spent.system for spent in times))


if __name__ == "__main__":
    side: dict[str, Callable[[str, int], Rates]] = {
        "loader": loader,
        "loader2": partial(loader, workers=2),
        "decoder": decoder,
    }
    print(*side[sys.argv[1]](sys.argv[2], int(sys.argv[3])))
    sys.stdout.flush()
    os._exit(0)
