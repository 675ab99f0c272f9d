"""The TrainJob of Kubeflow Trainer with a TrainingRuntime of its own: a JobSet of one Indexed Job.

The pods are those of an Indexed Job and start the supervisors of their ranks themselves. Pure.
"""

from collections.abc import Sequence

from trainer.launch.kubernetes.indexed_job import IndexedJob, IndexedJobKind
from trainer.launch.kubernetes.kind_row import Object
from trainer.launch.kubernetes.pod_values import Yaml

JOBSET_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"


class TrainJob(IndexedJob):
    """Values of a TrainJob and its pods."""

    @property
    def container(self) -> str:
        """Name that Kubeflow Trainer asks of the container, and of the Job within the JobSet."""
        return "node"

    @property
    def first_pod(self) -> str:
        return f"{self.name}-{self.container}-0-0.{self.name}"

    @property
    def own_pods(self) -> Yaml:
        """Selector of the pods, by the label that the JobSet gives them."""
        return {"matchLabels": {JOBSET_NAME_LABEL: self.name}}


class TrainJobKind(IndexedJobKind):
    """TrainJobs."""

    name = "trainjob"
    kind = "TrainJob"
    group = "trainer.kubeflow.org"
    version = "v1alpha1"
    plural = "trainjobs"
    controller = "Kubeflow Trainer"
    advice = "Kubeflow Trainer, v2.0 or newer, must be installed (trainer.kubeflow.org/v1alpha1)"
    view = TrainJob
    template = "k8s/trainjob.yaml.j2"
    pod_label = JOBSET_NAME_LABEL
    without = (*IndexedJobKind.without, "ttl_s")

    def pods(self, objects: Sequence[Object]) -> dict[str, Object]:
        """Returns the part of the TrainingRuntime that holds the pods' template."""
        [runtime] = [item for item in objects if item["kind"] == "TrainingRuntime"]
        part: Object = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        return {"worker": part}

    def workers(self, found: Object) -> int:
        """Returns the number of pods that a TrainJob asks for."""
        return int(found["spec"]["trainer"]["numNodes"])

    def phase(self, found: Object) -> tuple[str, str] | None:
        """Returns a word for what a TrainJob does, and since when; None if it has not been started."""
        jobs = found.get("status", {}).get("jobsStatus", [])
        if not jobs:
            return None
        ready = any(each.get("ready") for each in jobs)
        return "running" if ready else "waiting", str(found["metadata"]["creationTimestamp"])

    def made_by(self, name: str) -> set[str]:
        return {f"{name}-node-0"}
