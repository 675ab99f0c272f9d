"""Finds the order of samples in which a job's run was begun, since it goes on in that. Imports no torch."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trainer.checkpoint.identity import recorded_order
from trainer.config import Job
from trainer.run.checkpoints import MANIFEST, newest_whole
from trainer.run.folder import run_folder
from trainer.run.layout import CHECKPOINTS
from trainer.safe_io.plain import read_json


def begun_order(job: Job) -> Mapping[str, Any] | None:
    """Returns the order that the newest checkpoint in the run folder has recorded; None without one."""
    newest = newest_whole(run_folder(job) / CHECKPOINTS)
    if job.checkpoint.resume == "never" or newest is None:
        return None
    with suppress(OSError, ValueError):
        return recorded_order(read_json(newest[1] / MANIFEST, links=True))
    return None


def with_order(job: Job) -> Job:
    """Returns the job with its run's order where it names none."""
    begun = None if job.data.order or job.data.streams else begun_order(job)
    if begun is None:
        return job
    return job.model_copy(update={"data": job.data.model_copy(update={"order": begun["order"]})})
