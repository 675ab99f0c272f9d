"""Table of the gang schedulers, which start all pods of a job or none.

A scheduler finds a gang's size in a PodGroup. Beside an Indexed Job the manifest has it; for a TrainJob
Kubeflow Trainer makes it, as the TrainingRuntime says, and for an MPIJob the MPI Operator. Kueue is no row:
it starts whole jobs, whatever schedules their pods (`kubernetes.queue`). Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.config import Kubernetes

Yaml = dict[str, Any]
Place = Literal["labels", "annotations"]


@dataclass(frozen=True)
class Gang:
    """One scheduler. Each mapping is from keys of [kubernetes] to the names that they have elsewhere."""

    scheduler: str
    """Its name in the pods, as its project installs it."""
    group: str
    version: str
    advice: str
    """Advice for a cluster that does not know its PodGroups."""
    mark: str
    """Label or annotation of the pods that has the PodGroup's name."""
    marked_in: Place
    spec: Mapping[str, str]
    """Keys that the PodGroup's spec has."""
    of_mpijob: Mapping[str, str]
    """Keys that an MPIJob's schedulingPolicy has, for the operator's PodGroup."""
    policy: str
    """Name of Kubeflow Trainer's podGroupPolicy."""
    policy_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys that this policy has."""
    runtime_annotations: Mapping[str, str] = field(default_factory=dict)
    """Keys that Kubeflow Trainer reads in annotations of the TrainingRuntime's template."""
    kind: str = "PodGroup"
    plural: str = "podgroups"

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"

    def marks(self, name: str, place: Place) -> Yaml:
        """Returns the labels or annotations with which pods belong to the PodGroup of this name."""
        return {self.mark: name} if place == self.marked_in else {}


GANGS: Mapping[str, Gang] = {
    "volcano": Gang(
        scheduler="volcano",
        group="scheduling.volcano.sh",
        version="v1beta1",
        advice='Volcano must be installed (scheduling.volcano.sh/v1beta1), or set kubernetes.gang = "none"',
        mark="scheduling.k8s.io/group-name",
        marked_in="annotations",
        spec={"gang_queue": "queue", "priority_class": "priorityClassName"},
        of_mpijob={"gang_queue": "queue", "priority_class": "priorityClass"},
        policy="volcano",
        runtime_annotations={"gang_queue": "scheduling.volcano.sh/queue-name"},
    ),
    "scheduler-plugins": Gang(
        scheduler="scheduler-plugins-scheduler",
        group="scheduling.x-k8s.io",
        version="v1alpha1",
        advice=(
            "the scheduler-plugins must be installed (scheduling.x-k8s.io/v1alpha1), or set "
            'kubernetes.gang = "none"'
        ),
        mark="scheduling.x-k8s.io/pod-group",
        marked_in="labels",
        spec={"gang_timeout_s": "scheduleTimeoutSeconds"},
        of_mpijob={"gang_timeout_s": "scheduleTimeoutSeconds"},
        policy="coscheduling",
        policy_keys={"gang_timeout_s": "scheduleTimeoutSeconds"},
    ),
}
"""Rows by the value of `kubernetes.gang`; "none" has no row."""


def values(k8s: Kubernetes, names: Mapping[str, str]) -> Yaml:
    """Returns the values of the keys that are set, by the names that they have elsewhere."""
    given = {name: getattr(k8s, key) for key, name in names.items()}
    return {name: value for name, value in given.items() if value is not None}
