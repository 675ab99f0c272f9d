"""One of several ranks on null GPUs: trains in folders of its own and waits for nothing once DDP is warm.

`python -m tests.support.null_gpu_rank FOLDER BACKEND JOBS`. JOBS is JSON: sections of a job by the name of a
case; one after the other is trained, all with the [comm] of the first. DDP itself waits in its first ten
steps, to time them.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.jobs import tiny_job
from tests.support.null_gpu import Steps
from tests.support.rank import joined, tell
from tests.support.training import run, setup_of
from trainer.comm.protocol import Comm

FIRST, LAST = 12, 16


def main(folder: Path, backend: str, jobs: str) -> None:
    cases = json.loads(jobs)
    of_first = next(iter(cases.values())).get("comm", {})
    job = tiny_job(comm={"backend": backend, **of_first}, model={"precision": "bf16"})
    with joined(job) as comm:
        for name, sections in cases.items():
            tell([name, comm.world.rank, _given(folder / name / str(comm.world.rank), comm, sections)])


def _given(folder: Path, comm: Comm, sections: dict[str, Any]) -> Counter[str]:
    """Trains, and returns the bytes that went into each kind of collective in all watched steps."""
    setup = setup_of(
        folder,
        comm,
        dict,
        model={"precision": "bf16", **sections.get("model", {})},
        optim={"steps": LAST + 1, **sections.get("optim", {})},
        eval={"zero_shot": (), "retrieval": ()},
        logging={"every_steps": 2},
    )
    with Steps(FIRST, LAST) as steps:
        run(setup)
    steps.check()
    given = Counter[str]()
    for event in steps.seen.collectives:
        given[event.what] += event.bytes
    return given


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
