"""One of several ranks on null GPUs: trains in its own folder and prints its waits once DDP is warm.

`python -m tests.support.null_gpu_rank FOLDER LOSS LOSS_TILE BACKEND`. DDP itself waits in its first
ten steps, to time them.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

from tests.support.jobs import tiny_job
from tests.support.null_gpu import Steps
from tests.support.training import run, setup_of
from trainer.comm.connect import connect
from trainer.supervise.world import detect

FIRST, LAST = 12, 16


def main(folder: Path, loss: str, loss_tile: int, backend: str) -> None:
    comm = connect(
        tiny_job(comm={"backend": backend}, model={"precision": "bf16"}),
        detect(os.environ, os.uname().nodename),
        os.environ,
    )
    setup = setup_of(
        folder / str(comm.world.rank),
        comm,
        dict,
        model={"precision": "bf16"},
        optim={"steps": LAST + 1, "loss": loss, "loss_tile": loss_tile},
        eval={"zero_shot": (), "retrieval": ()},
        logging={"every_steps": 2},
    )
    with Steps(FIRST, LAST) as steps:
        run(setup)
    seen = steps.seen
    assert seen.waits == [], seen.table()
    assert (seen["mallocs"], seen["host_allocs"]) == (0, 0)
    reduced = seen["all_reduce"] + seen["reduce_scatter"]
    _say(f"rank {comm.world.rank} waited for nothing, reduced {reduced} times")
    given = Counter[str]()
    for event in seen.collectives:
        given[event.what] += event.bytes
    _say(f"rank {comm.world.rank} gave {json.dumps(given)}")
    comm.close()


def _say(line: str) -> None:
    """Writes a line at once, so that those of two ranks are never mixed."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
