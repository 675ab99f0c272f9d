"""Renders a job as the text of the object that runs it and of the objects beside it.

Uses no clock, no network and no cluster, and of the files only model configs. Imports neither torch nor the
client.
"""

from trainer.config import Job
from trainer.launch.kubernetes.kinds import kind_of
from trainer.launch.kubernetes.patch import patched
from trainer.launch.kubernetes.validate import validate
from trainer.launch.templates import render


def manifest(job: Job) -> str:
    """Returns the YAML that `kubectl apply` takes.

    Raises InputError that lists everything that cannot work on Kubernetes.
    """
    validate(job)
    row = kind_of(job)
    text = render(row.template, job=job, k8s=job.kubernetes, m=row(job))
    return patched(text, job.kubernetes.patch, row.pods)
