"""Gangs and queues: who makes a PodGroup, how pods belong to it, what Kueue is asked for and says."""

from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from tests.support.kubernetes_jobs import TOPOLOGY, kubernetes_job, objects_of
from trainer.errors import InputError
from trainer.launch.kubernetes.cluster import explain
from trainer.launch.kubernetes.gangs import GANGS
from trainer.launch.kubernetes.kinds import KINDS
from trainer.launch.kubernetes.kueue import why_queued
from trainer.launch.kubernetes.manifest import manifest
from trainer.launch.kubernetes.pods import QUEUE_LABEL

RECOVERY = {"max_restarts": 3, "spare_nodes": 1, "min_nodes": 1}
VOLCANO = {"gang": "volcano", "gang_queue": "research", "priority_class": "high"}
PLUGINS = {"gang": "scheduler-plugins", "gang_timeout_s": 300}


def rendered(kind: str, keys: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Returns the rendered objects by kind."""
    job = kubernetes_job(kubernetes={"kind": kind, **keys}, **sections)
    return {item["kind"]: item for item in objects_of(manifest(job))}


def template_of(kind: str, objects: dict[str, Any]) -> dict[str, Any]:
    """Returns the template of the pods with ranks."""
    template: dict[str, Any] = KINDS[kind].pods(list(objects.values()))["worker"]["template"]
    return template


@pytest.mark.parametrize(
    ("keys", "api_version", "spec"),
    [
        (
            VOLCANO,
            "scheduling.volcano.sh/v1beta1",
            {"minMember": 3, "queue": "research", "priorityClassName": "high"},
        ),
        (PLUGINS, "scheduling.x-k8s.io/v1alpha1", {"minMember": 3, "scheduleTimeoutSeconds": 300}),
    ],
    ids=["volcano", "scheduler-plugins"],
)
def test_a_job_has_a_pod_group_of_all_its_pods_since_a_start_begins_with_all(
    keys: dict[str, Any], api_version: str, spec: dict[str, Any]
) -> None:
    objects = rendered("job", keys, recovery=RECOVERY)
    group = objects["PodGroup"]
    assert group["apiVersion"] == api_version
    assert group["spec"] == spec
    assert group["metadata"]["name"] == objects["Job"]["metadata"]["name"]
    assert group["spec"]["minMember"] == objects["Job"]["spec"]["completions"]
    assert list(objects)[-1] == "Job", "the job's own object comes last"


@pytest.mark.parametrize("kind", ["job", "trainjob"])
@pytest.mark.parametrize("keys", [VOLCANO, PLUGINS], ids=["volcano", "scheduler-plugins"])
def test_pods_go_to_the_gangs_scheduler_and_name_their_group(kind: str, keys: dict[str, Any]) -> None:
    template = template_of(kind, rendered(kind, keys))
    gang = GANGS[keys["gang"]]
    assert template["spec"]["schedulerName"] == gang.scheduler
    assert template["metadata"][gang.marked_in][gang.mark] == "first-run"


def test_kubeflow_trainer_makes_the_pod_group_that_the_runtime_asks_for() -> None:
    volcano, plugins = rendered("trainjob", VOLCANO), rendered("trainjob", PLUGINS)
    assert "PodGroup" not in volcano.keys() | plugins.keys()
    spec = volcano["TrainingRuntime"]["spec"]
    assert spec["podGroupPolicy"] == {"volcano": {}}
    assert spec["template"]["metadata"]["annotations"] == {"scheduling.volcano.sh/queue-name": "research"}
    spec = plugins["TrainingRuntime"]["spec"]
    assert spec["podGroupPolicy"] == {"coscheduling": {"scheduleTimeoutSeconds": 300}}
    assert "metadata" not in spec["template"]


@pytest.mark.parametrize("keys", [VOLCANO, PLUGINS], ids=["volcano", "scheduler-plugins"])
def test_the_mpi_operator_makes_the_pod_group_and_marks_the_pods_of_an_mpijob(keys: dict[str, Any]) -> None:
    objects = rendered("mpijob", keys)
    assert "PodGroup" not in objects
    template = template_of("mpijob", objects)
    assert "schedulerName" not in template["spec"]
    gang = GANGS[keys["gang"]]
    assert gang.mark not in template["metadata"].get(gang.marked_in, {})


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gang_nothing_speaks_of_one(kind: str) -> None:
    text = manifest(kubernetes_job(kubernetes={"kind": kind}))
    assert not [word for word in ("PodGroup", "podGroup", "schedulerName", "scheduling") if word in text]


@pytest.mark.parametrize("name", GANGS)
def test_a_cluster_without_the_scheduler_is_explained_by_what_is_missing(name: str) -> None:
    refusal = ApiException(status=404, reason="Not Found")
    refusal.body = "404 page not found"
    said = explain(refusal, "create the PodGroup", "team", GANGS[name])
    assert said.startswith(
        "cannot create the PodGroup in namespace team: the cluster does not know PodGroups"
    )
    assert "must be installed" in said
    assert GANGS[name].api_version in said


@pytest.mark.parametrize("placement", ["required", "preferred"])
@pytest.mark.parametrize("kind", KINDS)
def test_kueue_is_asked_for_one_place_of_a_level_for_the_pods_with_ranks(kind: str, placement: str) -> None:
    objects = rendered(kind, {**TOPOLOGY, "placement": placement})
    asked = template_of(kind, objects)["metadata"]["annotations"]
    assert asked == {f"kueue.x-k8s.io/podset-{placement}-topology": TOPOLOGY["topology"]}
    own = objects[KINDS[kind].kind]
    assert own["metadata"]["labels"][QUEUE_LABEL] == TOPOLOGY["queue"]
    assert own["spec"].get("runPolicy", own["spec"])["suspend"] is True


@pytest.mark.parametrize("key", ["pack_by", "spread_by"])
def test_only_one_of_kueue_and_the_scheduler_chooses_the_nodes(key: str) -> None:
    with pytest.raises(InputError, match="leave these out, or topology"):
        rendered("job", {**TOPOLOGY, key: "kubernetes.io/hostname"})


class Kueue:
    """The part of a cluster that has the Workloads of one version of Kueue's API, or refuses to show them."""

    namespace = "team"

    def __init__(self, version: str, *workloads: dict[str, Any], status: int = 404) -> None:
        self.version, self.workloads, self.status = version, workloads, status
        self.custom = SimpleNamespace(list_namespaced_custom_object=self.list)

    def list(self, group: str, version: str, *place: str, label_selector: str) -> dict[str, Any]:
        if version != self.version:
            raise ApiException(status=self.status)
        assert (group, place) == ("kueue.x-k8s.io", ("team", "workloads"))
        assert label_selector == "kueue.x-k8s.io/job-uid=u-1"
        return {"items": list(self.workloads)}


def workload(**condition: str) -> dict[str, Any]:
    return {"status": {"conditions": [condition]}}


WAITS = workload(type="QuotaReserved", status="False", message="insufficient unused quota for cpu")
ADMITTED = workload(type="QuotaReserved", status="True", message="Quota reserved in ClusterQueue team")


@pytest.mark.parametrize(
    ("kueue", "expected"),
    [
        (Kueue("v1beta2", WAITS), "gpu-queue: insufficient unused quota for cpu"),
        (Kueue("v1beta1", WAITS), "gpu-queue: insufficient unused quota for cpu"),
        (Kueue("v1beta2"), "gpu-queue: Kueue does not know the job (does it run, and watch this namespace?)"),
        (Kueue("v1beta2", ADMITTED), ""),
        (Kueue("none"), ""),
        (Kueue("none", status=403), ""),
    ],
    ids=["waits", "older", "unseen", "admitted", "no-kueue", "forbidden"],
)
def test_status_says_what_a_job_in_a_queue_waits_for(kueue: Any, expected: str) -> None:
    found = {"metadata": {"uid": "u-1", "labels": {QUEUE_LABEL: "gpu-queue"}}}
    assert why_queued(kueue, found) == expected
    assert why_queued(kueue, {"metadata": {"uid": "u-1"}}) == ""
