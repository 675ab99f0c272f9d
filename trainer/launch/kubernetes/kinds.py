"""Table of the kinds of object that can run a job: a row holds all that other modules need to know about one.

A kind is one module with a subclass of `trainer.launch.kubernetes.pods.Pods`, one template, and one row here.
No other module compares a kind's name. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainer.comm.backends import Launcher, launcher_for
from trainer.config import Job
from trainer.launch.kubernetes import indexed_job, mpijob, trainjob
from trainer.launch.kubernetes.pods import Pods

Object = dict[str, Any]


@dataclass(frozen=True)
class KindRow:
    """One kind of object. Functions of an object take it as the API server has it."""

    name: Literal["mpijob", "job", "trainjob"]
    """Value of `kubernetes.kind`."""
    kind: str
    """Its name in Kubernetes, and in messages."""
    group: str
    version: str
    plural: str
    controller: str
    """Program that makes its pods, in messages."""
    advice: str
    """Advice for a cluster that does not know the kind."""
    view: type[Pods]
    """Values of the template, made from a job."""
    template: str
    pods: Callable[[Sequence[Object]], dict[str, Object]]
    """Parts of the rendered objects that hold a pod's `template`, by its role: launcher or worker."""
    workers: Callable[[Object], int]
    """Number of the pods that have ranks."""
    ended_at: Callable[[Object], str | None]
    """Time at which the object has ended; None if it has not."""
    succeeded: str
    """Condition of an object that has ended well."""
    phase: Callable[[Object], tuple[str, str] | None]
    """Word for what the object does, and since when; None if nothing has been done about it."""
    starter: str
    """Program that starts the ranks."""
    starts_ranks_by: str
    """The same in a clause."""
    keeps_going: bool
    """True if the other pods go on when one is gone; MPI ends all."""
    pod_label: str
    """Label of the pods that has the object's name."""
    output: Mapping[str, str]
    """Labels of the pods whose logs are the run's output; there is one at a time."""
    output_pod: str
    """Such a pod, in messages."""
    made_by: Callable[[str], set[str]]
    """Names of other objects that the controller makes for an object of this name."""
    without: tuple[str, ...] = ()
    """Keys of [kubernetes] that mean nothing for this kind."""

    @property
    def has_launcher(self) -> bool:
        """True if a pod without ranks starts the ranks of the others."""
        return not self.keeps_going

    @property
    def launcher(self) -> Launcher:
        """Launcher of the ranks, as the backends know it."""
        return self.view.launcher

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"


_MPIJOB = KindRow(
    name="mpijob",
    kind="MPIJob",
    group="kubeflow.org",
    version="v2beta1",
    plural="mpijobs",
    controller="the MPI Operator",
    advice="the MPI Operator, v0.3 or newer, must be installed (kubeflow.org/v2beta1)",
    view=mpijob.MpiJob,
    template="k8s/mpijob.yaml.j2",
    pods=mpijob.pods,
    workers=mpijob.workers,
    ended_at=mpijob.ended_at,
    succeeded="Succeeded",
    phase=mpijob.phase,
    starter="mpirun",
    starts_ranks_by="the MPI Operator starts ranks by mpirun",
    keeps_going=False,
    pod_label=mpijob.JOB_NAME_LABEL,
    output={mpijob.ROLE_LABEL: "launcher"},
    output_pod="launcher",
    made_by=lambda name: {f"{name}-launcher"},
)
_JOB = KindRow(
    name="job",
    kind="Job",
    group="batch",
    version="v1",
    plural="jobs",
    controller="Kubernetes",
    advice="Kubernetes 1.29 or newer has them (batch/v1)",
    view=indexed_job.IndexedJob,
    template="k8s/job.yaml.j2",
    pods=indexed_job.pods,
    workers=indexed_job.workers,
    ended_at=indexed_job.ended_at,
    succeeded="Complete",
    phase=indexed_job.phase,
    starter="their pods",
    starts_ranks_by="each pod starts its own",
    keeps_going=True,
    pod_label=indexed_job.JOB_NAME_LABEL,
    output={indexed_job.INDEX_LABEL: "0"},
    output_pod="pod of index 0",
    made_by=lambda name: set(),
    without=(
        "launcher_cpu",
        "launcher_cpu_limit",
        "launcher_mem_gb",
        "launcher_annotations",
        "launcher_node_selector",
        "launcher_start",
        "gang",
        "gang_queue",
        "gang_timeout_s",
        "patch.launcher",
    ),
)

_TRAINJOB = replace(
    _JOB,
    name="trainjob",
    kind="TrainJob",
    group="trainer.kubeflow.org",
    version="v1alpha1",
    plural="trainjobs",
    controller="Kubeflow Trainer",
    advice="Kubeflow Trainer, v2.0 or newer, must be installed (trainer.kubeflow.org/v1alpha1)",
    view=trainjob.TrainJob,
    template="k8s/trainjob.yaml.j2",
    pods=trainjob.pods,
    workers=trainjob.workers,
    phase=trainjob.phase,
    pod_label=trainjob.JOBSET_NAME_LABEL,
    made_by=lambda name: {f"{name}-node-0"},
    without=(*_JOB.without, "ttl_s"),
)

KINDS: dict[str, KindRow] = {row.name: row for row in (_MPIJOB, _JOB, _TRAINJOB)}
"""Rows by the value of `kubernetes.kind`."""


def kind_of(job: Job) -> KindRow:
    """Returns the row of the job's kind; without the key, that of the job's launcher.

    An Indexed Job comes before a TrainJob, since every cluster has it.
    """
    if job.kubernetes.kind is not None:
        return KINDS[job.kubernetes.kind]
    chosen = launcher_for(job, several_hosts=True)
    return next(row for row in (_JOB, _MPIJOB) if row.launcher == chosen)


def launcher(job: Job) -> Launcher:
    """Returns the launcher of the job's ranks as the backends know it."""
    return kind_of(job).launcher


def starter(job: Job) -> str:
    """Returns the program that starts the ranks of the job, as messages name it."""
    return kind_of(job).starter
