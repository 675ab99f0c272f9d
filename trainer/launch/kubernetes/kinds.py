"""Table of the kinds of object that can run a job.

A kind is one module with a subclass of `trainer.launch.kubernetes.kind.Kind`, one template, and its place
here. No other module compares a kind's name. Pure.
"""

from trainer.comm.backends import launcher_for
from trainer.config import Job
from trainer.launch.kubernetes.indexed_job import IndexedJob, TrainJob
from trainer.launch.kubernetes.kind import Kind
from trainer.launch.kubernetes.mpijob import MpiJob

KINDS: dict[str, type[Kind]] = {kind.name_in_job: kind for kind in (MpiJob, IndexedJob, TrainJob)}
"""Kinds by the value of `kubernetes.kind`."""


def kind_of(job: Job) -> type[Kind]:
    """Returns the job's kind; without the key, that of the job's launcher.

    An Indexed Job comes before a TrainJob, since every cluster has it.
    """
    if job.kubernetes.kind is not None:
        return KINDS[job.kubernetes.kind]
    chosen = launcher_for(job, several_hosts=True)
    return next(kind for kind in (IndexedJob, MpiJob) if kind.launcher == chosen)
