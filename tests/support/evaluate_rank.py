"""A rank that only evaluates: `python -m tests.support.evaluate_rank BACKEND WEIGHTS FOLDER`.

Rank 0 tells the metrics.
"""

import sys
from pathlib import Path
from typing import Any

from tests.support.jobs import tiny_job
from tests.support.rank import joined, tell
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.evaluate.evaluation import Evaluation
from trainer.model.build import build_model

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


def measure(backend: str, weights: str, folder: Path, comm: Comm) -> list[Any]:
    """Collective: the metrics of each job."""
    jobs = evaluating_jobs(backend, weights, folder)
    clip = build_model(jobs[0], plan(jobs[0], 1), comm)
    return [Evaluation(job, comm)(clip) for job in jobs]


def main(backend: str, weights: str, folder: str) -> None:
    with joined(tiny_job(comm={"backend": backend})) as comm:
        found = measure(backend, weights, Path(folder), comm)
        if comm.world.rank == 0:
            tell(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
