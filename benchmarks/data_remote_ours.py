"""Our loader on far shards: `python -m benchmarks.data_remote_ours PATTERN EPOCHS WORKERS`.

Prints figures of whole epochs as JSON, of what the server was asked for without the index, which is made
before. A local pattern has the rates alone.
"""

import json
import os
import sys
import time
from urllib.request import urlopen

from benchmarks.data_ours import BATCH, WARM_UP, batches_of, processor_time
from benchmarks.slow_store import COPY
from trainer.config import Data
from trainer.data.files import stamp
from trainer.data.indexed import Indexed
from trainer.data.processes import start_process_server
from trainer.data.source import open_source


def counts(pattern: str) -> dict[str, int]:
    """Returns the server's requests and bytes since the last call; zeros for local files."""
    if "://" not in pattern:
        return {"requests": 0, "bytes": 0}
    with urlopen(f"{pattern.rpartition('/')[0]}/counts") as answer:
        found: dict[str, int] = json.load(answer)
        return found


def main(pattern: str, epochs: int, workers: int) -> None:
    start_process_server()  # as a rank does before anything else
    train: tuple[str, ...] = (pattern,)
    if "://" in pattern:
        # In place of epochs: blocks that are open when an epoch ends are not read again for the next one.
        place, _, names = pattern.rpartition("/")
        train, epochs = tuple(f"{place}/{COPY}{number}/{names}" for number in range(epochs)), 1
    source = open_source(Data(train=train))
    data = sum(stamp(path).size for path in source.index.paths) if isinstance(source, Indexed) else 0
    counts(pattern)
    start = time.perf_counter()
    stream = batches_of(source, workers=workers, epochs=epochs)
    next(stream)
    first = time.perf_counter() - start
    for _ in range(WARM_UP - 1):
        next(stream)
    begun, used = time.perf_counter(), processor_time()
    measured = len(source) // BATCH * epochs - WARM_UP
    for _ in range(measured):
        assert len(next(stream).keys) == BATCH
    rate = BATCH * measured / (time.perf_counter() - begun)
    us_of_processor = (processor_time() - used) / measured / BATCH * 1e6
    asked, seen = counts(pattern), len(source) * epochs
    print(
        json.dumps(
            {
                "rate": rate,
                "us_of_processor": us_of_processor,
                "first_batch_s": first,
                "requests_per_sample": asked["requests"] / seen,
                "bytes_share": asked["bytes"] / data,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)
