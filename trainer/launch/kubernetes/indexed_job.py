"""The Indexed Job, Kubernetes' own Job with a headless Service, and the TrainJob of Kubeflow Trainer.

No operator is needed for the first. A pod of each index starts the supervisors of its ranks. A TrainJob has a
TrainingRuntime of its own: a JobSet of one Indexed Job. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from trainer.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_START_AGAIN,
    EXIT_TIMED_OUT,
)
from trainer.launch.kubernetes.gangs import Place, Yaml, values
from trainer.launch.kubernetes.kind import JOB_FILE, OWN_UID, Kind, Object, program
from trainer.world.variables import KEEPS_GOING, RESPAWNS, SPARE_NODES

JOB_NAME_LABEL = "batch.kubernetes.io/job-name"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"


class IndexedJob(Kind):
    """Indexed Jobs."""

    name_in_job = "job"
    kind = "Job"
    api_version = "batch/v1"
    plural = "jobs"
    controller = "Kubernetes"
    advice = "Kubernetes 1.29 or newer has them (batch/v1)"
    template = "k8s/job.yaml.j2"
    succeeded = "Complete"
    launcher = "clipship"
    starter = "their pods"
    starts_ranks_by = "each pod starts its own"
    keeps_going = True
    pod_label = JOB_NAME_LABEL
    output: ClassVar[Mapping[str, str]] = {INDEX_LABEL: "0"}
    output_pod = "pod of index 0"
    without: ClassVar[tuple[str, ...]] = ("launcher_start", "patch.launcher")
    first_pod_suffix = "0"
    own_references: ClassVar[Sequence[Yaml]] = (OWN_UID,)
    container: ClassVar[str] = "worker"
    """Name of the pods' container."""
    command: ClassVar[Sequence[str]] = program("node", JOB_FILE)
    final_codes: ClassVar[Sequence[int]] = [EXIT_FAILED, EXIT_BAD_INPUT, EXIT_TIMED_OUT]
    """Exit codes with which the run has ended for good."""
    again_codes: ClassVar[Sequence[int]] = [EXIT_PREEMPTED, EXIT_START_AGAIN]
    """Exit codes of pods whose run goes on with others in their place."""

    @classmethod
    def pods(cls, objects: Sequence[Object]) -> dict[str, Object]:
        """Returns the part of the Job, the last of the objects, that holds its pods' template."""
        return {"worker": objects[-1]["spec"]}

    @classmethod
    def workers(cls, found: Object) -> int:
        """Returns the number of pods that a Job asks for."""
        return int(found["spec"]["parallelism"])

    @classmethod
    def ended_at(cls, found: Object) -> str | None:
        """Returns when a Job or a TrainJob has ended; None if it has not."""
        true = cls.conditions(found)
        end = true.get(cls.succeeded) or true.get("Failed")
        return str(end["lastTransitionTime"]) if end else None

    @classmethod
    def phase(cls, found: Object) -> tuple[str, str] | None:
        """Returns a word for what a Job does, and since when; None if it has not been started."""
        status = found.get("status", {})
        if "startTime" not in status:
            return None
        return "running" if status.get("ready") else "waiting", str(status["startTime"])

    @property
    def pod_count(self) -> int:
        """Number of pods, those of spare nodes included."""
        return self.job.resources.nodes + self.job.recovery.spare_nodes

    @property
    def pod_labels(self) -> Yaml:
        return super().pod_labels | self._marks("labels")

    @property
    def worker_annotations(self) -> Yaml:
        return super().worker_annotations | self._marks("annotations")

    def _marks(self, place: Place) -> Yaml:
        return self.gang.marks(self.name, place) if self.gang else {}

    @property
    def pod_group(self) -> Yaml:
        """Spec of the PodGroup. A start begins with all pods, those of spare nodes included."""
        return {"minMember": self.pod_count, **values(self.k8s, self.gang.spec)} if self.gang else {}

    @property
    def members(self) -> int:
        return self.pod_count * self.job.resources.ranks_per_node

    @property
    def own_variables(self) -> dict[str, str]:
        recovery = self.job.recovery
        spares = {SPARE_NODES: str(recovery.spare_nodes)} if recovery.spare_nodes else {}
        return {KEEPS_GOING: "1", RESPAWNS: "1", **spares} if recovery.max_restarts else {}

    @property
    def backoff_limit(self) -> int:
        """Pods that may be lost: as often as the run may go on after a loss, all of them."""
        return (self.k8s.backoff_limit + self.job.recovery.max_restarts) * self.pod_count

    @property
    def ends_without_all(self) -> bool:
        """True if the run may be done although a pod never comes back."""
        return self.job.recovery.spare_nodes > 0 or self.job.recovery.min_nodes is not None

    @property
    def ports(self) -> list[Yaml]:
        place = self.meeting["CLIPSHIP_SUPERVISORS"]
        return [{"name": "supervisors", "port": int(place.rpartition(":")[2])}]


JOBSET_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"


class TrainJob(IndexedJob):
    """TrainJobs."""

    name_in_job = "trainjob"
    kind = "TrainJob"
    api_version = "trainer.kubeflow.org/v1alpha1"
    plural = "trainjobs"
    controller = "Kubeflow Trainer"
    advice = "Kubeflow Trainer, v2.0 or newer, must be installed (trainer.kubeflow.org/v1alpha1)"
    template = "k8s/trainjob.yaml.j2"
    pod_label = JOBSET_NAME_LABEL
    unseen = ("must be created before the TrainJob", "-job' not found")
    """Words of Kubeflow Trainer, and of Kueue."""
    first_pod_suffix = "node-0-0"
    makes = ("-node-0",)
    container = "node"
    """Name that Kubeflow Trainer asks of the container, and of the Job within the JobSet."""

    @classmethod
    def pods(cls, objects: Sequence[Object]) -> dict[str, Object]:
        """Returns the part of the TrainingRuntime that holds the pods' template."""
        [runtime] = [item for item in objects if item["kind"] == "TrainingRuntime"]
        part: Object = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
        return {"worker": part}

    @classmethod
    def workers(cls, found: Object) -> int:
        """Returns the number of pods that a TrainJob asks for."""
        return int(found["spec"]["trainer"]["numNodes"])

    @property
    def pod_group_policy(self) -> Yaml:
        """Policy by which Kubeflow Trainer makes the PodGroup, which has the TrainJob's name."""
        return {self.gang.policy: values(self.k8s, self.gang.policy_keys)} if self.gang else {}

    @property
    def runtime_annotations(self) -> Yaml:
        return values(self.k8s, self.gang.runtime_annotations) if self.gang else {}
