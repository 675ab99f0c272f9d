"""A rank that only evaluates: `python -m tests.support.evaluate_rank BACKEND WEIGHTS FOLDER`.

Rank 0 prints the metrics as JSON.
"""

import json
import os
import sys
from pathlib import Path

from tests.support.jobs import tiny_job
from trainer.comm.connect import connect
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.evaluate.evaluation import Evaluation, Metrics
from trainer.model.build import build_model
from trainer.world.launchers import detect

TEMPLATES = ("a {}", "the number {}")
CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def evaluating_jobs(backend: str, weights: str, folder: Path) -> list[Job]:
    """Measures many images with the same captions in shards, and a folder for each class.

    A table and a shard have fewer images than there are ranks.
    """
    held_out, words = (
        str(folder / "shards" / "*.tar"),
        {"class_names": CLASSES, "templates": TEMPLATES, "batch_size": 8},
    )
    sets = [
        {"zero_shot": (held_out,), "retrieval": (held_out,)},
        {"zero_shot": (str(folder / "classes"),), "retrieval": (str(folder / "two.csv"),)},
        {"zero_shot": (str(folder / "one" / "*.tar"),)},
    ]
    jobs = [tiny_job(comm={"backend": backend}, eval={**words, **names}) for names in sets]
    return [
        job.model_copy(update={"model": job.model.model_copy(update={"pretrained": weights})}) for job in jobs
    ]


def measure(backend: str, weights: str, folder: Path, comm: Comm) -> list[Metrics]:
    """Collective: the metrics of each job."""
    jobs = evaluating_jobs(backend, weights, folder)
    clip = build_model(jobs[0], plan(jobs[0], 1), comm)
    return [Evaluation(job, comm)(clip) for job in jobs]


def main(backend: str, weights: str, folder: str) -> None:
    world = detect(os.environ, os.uname().nodename)
    comm = connect(tiny_job(comm={"backend": backend}), world, os.environ)
    found = measure(backend, weights, Path(folder), comm)
    if world.rank == 0:
        print(json.dumps(found), flush=True)
    comm.barrier(60)
    comm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
