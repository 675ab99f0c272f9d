"""Gangs and queues: who makes a PodGroup, how pods belong to it, what Kueue is asked for and says."""

from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from tests.support.kubernetes_jobs import TOPOLOGY, kubernetes_job, objects_of
from trainer.errors import InputError
from trainer.launch.kubernetes.cluster import explain
from trainer.launch.kubernetes.gangs import GANGS
from trainer.launch.kubernetes.kind import QUEUE_LABEL
from trainer.launch.kubernetes.manifest import manifest
from trainer.launch.kubernetes.state import why_queued


def rendered(kind: str, keys: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Returns the rendered objects by kind."""
    job = kubernetes_job(kubernetes={"kind": kind, **keys}, **sections)
    return {item["kind"]: item for item in objects_of(manifest(job))}


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


@pytest.mark.parametrize("key", ["pack_by", "spread_by"])
def test_only_one_of_kueue_and_the_scheduler_chooses_the_nodes(key: str) -> None:
    with pytest.raises(InputError, match="leave these out, or topology"):
        rendered("job", {**TOPOLOGY, key: "kubernetes.io/hostname"})


@pytest.mark.parametrize(
    ("kind", "workload"), [("mpijob", "MPIJob"), ("job", "Job"), ("trainjob", "TrainJob")]
)
def test_what_kueue_admits_is_queued_alone(kind: str, workload: str) -> None:
    objects = rendered(kind, {"queue": "gpus"})
    queued = [name for name, each in objects.items() if QUEUE_LABEL in each["metadata"].get("labels", {})]
    assert queued == [workload]
    assert len(objects) > 2


class Kueue:
    """The part of a cluster that has the Workloads of one version of Kueue's API, or refuses to show them."""

    def __init__(self, version: str, *workloads: dict[str, Any], status: int = 404) -> None:
        self.version, self.workloads, self.status = version, workloads, status

    def ask(self, method: str, api_version: str, plural: str, *, labelSelector: str) -> dict[str, Any]:
        group, version = api_version.split("/")
        if version != self.version:
            raise ApiException(status=self.status)
        assert (method, group, plural) == ("get", "kueue.x-k8s.io", "workloads")
        assert labelSelector == "kueue.x-k8s.io/job-uid=u-1"
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
