"""The vcjob, which is Volcano's own Job (batch.volcano.sh): the pods of an Indexed Job as one gang. Pure.

Volcano's plugin svc is not used: it gives each pod a name, but its Service, ConfigMap and NetworkPolicy have
names of the job's own, and Volcano deletes them whenever it starts a pod again. The supervisors need the name
of the first pod only, and a Service of ours gives it.
"""

from collections.abc import Sequence

from trainer.launch.kubernetes.gangs import GANGS, Gang, Place, values
from trainer.launch.kubernetes.indexed_job import IndexedJob, IndexedJobKind
from trainer.launch.kubernetes.kind_row import Object
from trainer.launch.kubernetes.pod.names import INDEX, JOB_UID
from trainer.launch.kubernetes.pod_values import Yaml

JOB_NAME_LABEL = "volcano.sh/job-name"
INDEX_LABEL = "volcano.sh/task-index"
FIRST = {INDEX_LABEL: "0"}
_LEAVE_S = 3
"""Time in which the other pods of a run that has ended leave by themselves.

Volcano deletes pods that still run, with their logs, when it ends a job. The time must be shorter than it
takes to submit a job again: Volcano v1.15 would end the next job of the same name, too. Before a restart
there is none: pods that have all ended within it are a failed job.
"""


class VcJob(IndexedJob):
    """Values of a vcjob and its pods."""

    @property
    def first_pod(self) -> str:
        """Name of the Service, which has the first pod alone: Volcano gives pods no names for others."""
        return self.name

    @property
    def own_pods(self) -> Yaml:
        """Selector of the pods, by the label that Volcano gives them."""
        return {"matchLabels": {JOB_NAME_LABEL: self.name}}

    @property
    def first_selector(self) -> Yaml:
        return {**self.own_pods["matchLabels"], **FIRST}

    @property
    def gang(self) -> Gang:
        return GANGS["volcano"]

    def _marks(self, place: Place) -> Yaml:
        """Returns nothing: Volcano makes the PodGroup and marks the pods."""
        return {}

    @property
    def min_available(self) -> int:
        """Number of pods that start together: all.

        Where the run may end without some, it is the number without which it cannot go on: Volcano asks for
        that many before it sees that one pod is done.
        """
        least = self.job.recovery.min_nodes or self.job.resources.nodes
        return least if self.ends_without_all else self.pods

    @property
    def of_gang(self) -> Yaml:
        """Queue and priority of the gang."""
        return values(self.k8s, self.gang.spec)

    @property
    def max_retry(self) -> int:
        """Restart with which Volcano gives the job up: the one after those that the run may need.

        Volcano counts every restart, of a pod or of all, and also that of a pod that was asked to go.
        """
        return self.backoff_limit + self.k8s.retries * self.pods + 1

    @property
    def policies(self) -> list[Yaml]:
        """Actions of Volcano for a pod that has failed; the first that fits counts.

        Pods that leave together start again together, in one action. With RestartPod for each at the same
        time, Volcano v1.15 loses the PodGroup, and the job stays pending.
        """
        ends = [
            {"exitCode": code, "action": "TerminateJob", "timeout": f"{_LEAVE_S}s"}
            for code in self.final_codes
        ]
        again = [{"exitCode": code, "action": "RestartJob"} for code in self.again_codes]
        return [*ends, *again, {"event": "PodFailed", "action": "RestartPod"}]

    @property
    def own_references(self) -> list[Yaml]:
        places = {
            INDEX: f"metadata.labels['{INDEX_LABEL}']",
            JOB_UID: f"metadata.annotations['{self.gang.mark}']",  # NAME-UID
        }
        return [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in places.items()
        ]


_PHASES = {
    "Pending": "waiting",
    "Restarting": "restarting",
    "Running": "running",
    "Aborting": "suspended",
    "Aborted": "suspended",
    "Completing": "ending",
    "Terminating": "failing",
}


class VcJobKind(IndexedJobKind):
    """Jobs of Volcano."""

    name = "vcjob"
    kind = "vcjob"
    group = "batch.volcano.sh"
    version = "v1alpha1"
    controller = "Volcano"
    advice = "Volcano, v1.15 or newer, must be installed (batch.volcano.sh/v1alpha1)"
    view = VcJob
    template = "k8s/vcjob.yaml.j2"
    succeeded = "Completed"
    pod_label = JOB_NAME_LABEL
    output = FIRST
    ends = ("Completed", "Failed", "Terminated")
    deletion = "Foreground"
    """Volcano v1.15 forgets the next job of the same name if pods outlive the one that was deleted."""
    without = (*IndexedJobKind.without, "queue", "topology", "gang", "gang_timeout_s", "deadline_s")

    @property
    def api_kind(self) -> str:
        return "Job"

    def pods(self, objects: Sequence[Object]) -> dict[str, Object]:
        """Returns the only task of the vcjob, which holds the pods' template."""
        return {"worker": objects[-1]["spec"]["tasks"][0]}

    def workers(self, found: Object) -> int:
        """Returns the number of pods that a vcjob asks for."""
        return int(found["spec"]["tasks"][0]["replicas"])

    def conditions(self, found: Object) -> dict[str, Object]:
        """Returns the state of a vcjob by its phase, the only thing that is true of it."""
        state = found.get("status", {}).get("state", {})
        return {state["phase"]: {**state, "type": state["phase"]}} if "phase" in state else {}

    def phase(self, found: Object) -> tuple[str, str] | None:
        """Returns a word for what a vcjob does, and since when; None if Volcano has not seen it."""
        for phase, state in self.conditions(found).items():
            return _PHASES.get(phase, phase.lower()), str(state["lastTransitionTime"])
        return None
