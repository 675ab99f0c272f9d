"""Gangs: who makes a PodGroup, how many pods it counts, and how pods belong to it."""

from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from tests.support.kubernetes_jobs import kubernetes_job, objects_of
from trainer.launch.kubernetes.cluster import explain
from trainer.launch.kubernetes.gangs import GANGS
from trainer.launch.kubernetes.kinds import KINDS
from trainer.launch.kubernetes.manifest import manifest

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
