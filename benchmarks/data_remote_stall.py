"""Batches that come within a second while one block of far shards is late.

`python -m benchmarks.data_remote_stall PATTERN SECONDS` lets the store hold a block back for so long once
four loader processes have eight batches ready, and prints how many come.
"""

import os
import sys
import time
from urllib.request import urlopen

from benchmarks.data_ours import BATCH, WARM_UP, batches_of
from trainer.config import Data
from trainer.data.lanes import Lanes
from trainer.data.processes import start_process_server
from trainer.data.source import open_source

WORKERS = 4
GET_READY_S = 1.0


def main(pattern: str, stall_s: str) -> None:
    start_process_server()  # as a rank does before anything else
    source = open_source(Data(train=(pattern,)))
    # One lane, and nothing read ahead of its use: each block is that of one batch or two.
    stream = batches_of(source, WORKERS, order=Lanes(BATCH, 1), ahead_bytes=1)
    for _ in range(WARM_UP * WORKERS):
        next(stream)
        time.sleep(GET_READY_S)
    urlopen(f"{pattern.rpartition('/')[0]}/stall/{stall_s}").close()
    begun, came = time.perf_counter(), 0
    while next(stream) and time.perf_counter() - begun < 1:
        came += 1
    print(came)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
