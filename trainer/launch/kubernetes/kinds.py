"""Table of the kinds of object that can run a job.

A kind is one module with a subclass of `trainer.launch.kubernetes.pods.Pods` and one of `KindRow`, one
template, and its place here. No other module compares a kind's name. Pure.
"""

from trainer.comm.backends import launcher_for
from trainer.config import Job
from trainer.launch.kubernetes.indexed_job import IndexedJobKind, TrainJobKind
from trainer.launch.kubernetes.kind_row import KindRow
from trainer.launch.kubernetes.mpijob import MpiJobKind

_MPIJOB, _JOB = MpiJobKind(), IndexedJobKind()
KINDS: dict[str, KindRow] = {row.name: row for row in (_MPIJOB, _JOB, TrainJobKind())}
"""Rows by the value of `kubernetes.kind`."""


def kind_of(job: Job) -> KindRow:
    """Returns the row of the job's kind; without the key, that of the job's launcher.

    An Indexed Job comes before a TrainJob, since every cluster has it.
    """
    if job.kubernetes.kind is not None:
        return KINDS[job.kubernetes.kind]
    chosen = launcher_for(job, several_hosts=True)
    return next(row for row in (_JOB, _MPIJOB) if row.launcher == chosen)
