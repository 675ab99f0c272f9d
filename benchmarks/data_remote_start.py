"""Seconds from opening many far shards to the first batch, as one rank starts.

`python -m benchmarks.data_remote_start PATTERN COPIES INDEX` reads each shard under that many addresses; the
folder INDEX gets what it lacks of their index.
"""

import os
import sys
import time
from pathlib import Path

from benchmarks.data_ours import batches_of
from benchmarks.slow_store import COPY
from trainer.config import Data
from trainer.data.bad_samples import Allowed
from trainer.data.index import index_shards, open_index, stale, write_catalogue
from trainer.data.processes import start_process_server
from trainer.data.shard_names import expand_shards
from trainer.data.shards import shard_selection
from trainer.data.source import open_with_index


def main(pattern: str, copies: int, folder: Path) -> None:
    start_process_server()  # as a rank does before anything else
    place, _, names = pattern.rpartition("/")
    data = Data(train=tuple(f"{place}/{COPY}{number}/{names}" for number in range(copies)))
    begun = time.perf_counter()
    paths, selection = expand_shards(data.train), shard_selection(data)
    if missing := stale(paths, selection, folder):
        write_catalogue(folder, selection, index_shards(missing, selection, folder))
    source = open_with_index(open_index(paths, selection, folder), data, Allowed.by(data))
    next(batches_of(source, workers=1))
    print(time.perf_counter() - begun)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)
