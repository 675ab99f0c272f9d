"""A rank that classifies sets of images: `python -m tests.support.zero_shot_rank BACKEND SHARDS ...`.

Rank 0 prints the metrics as JSON, a set an entry.
"""

import json
import os
import sys

from tests.support.jobs import tiny_job
from trainer.comm.connect import connect
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.evaluate.evaluation import Evaluation
from trainer.model.build import build_model
from trainer.world.launchers import detect

CLASSES = ("red", "green", "blue", "white", "black", "grey")


def job_of(backend: str, shards: str) -> Job:
    """Blocks of four images, so that the ranks have unequal numbers of them."""
    return tiny_job(
        comm={"backend": backend}, eval={"zero_shot": (shards,), "class_names": CLASSES, "batch_size": 4}
    )


def main(backend: str, *sets: str) -> None:
    job = tiny_job(comm={"backend": backend})
    comm = connect(job, detect(os.environ, os.uname().nodename), os.environ)
    clip = build_model(job, plan(job, 1), comm)
    found = [Evaluation(job_of(backend, shards), comm)(clip) for shards in sets]
    if comm.world.rank == 0:
        print(json.dumps(found), flush=True)
    comm.barrier(60)
    comm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
