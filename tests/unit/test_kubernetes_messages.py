"""Messages about a cluster: its refusals, and the state of an MPIJob.

tests/cluster/kubernetes asks a real cluster for most of them.
"""

import json
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from trainer.errors import ClusterError
from trainer.launch.kubernetes.cluster import Cluster, explain, lacks_permission
from trainer.launch.kubernetes.kinds import KINDS
from trainer.launch.kubernetes.state import state
from trainer.launch.kubernetes.validate import _digits_below


def refusal(status: int, message: str | None) -> ApiException:
    problem = ApiException(status=status, reason="R")
    problem.body = (
        "404 page not found\n" if message is None else json.dumps({"kind": "Status", "message": message})
    )
    return problem


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (401, "Unauthorized", "the cluster does not know you"),
        (
            403,
            'mpijobs.kubeflow.org is forbidden: User "u" cannot create resource "mpijobs"',
            "you lack the permission: mpijobs.kubeflow.org",
        ),
        (403, 'pods "x" is forbidden: exceeded quota: small, requested: cpu=8', "it would exceed the quota"),
        (
            403,
            'pods "x" is forbidden: failed quota: team: must specify limits.cpu for: launcher',
            'kubernetes.patch.launcher.spec.containers = [{ name = "launcher", resources.limits.cpu = ',
        ),
        (
            403,
            'pods "x" is forbidden: violates PodSecurity "restricted:latest": seccompProfile',
            "the namespace's pod security forbids it",
        ),
        (403, "no PriorityClass with name high was found", "no PriorityClass with name high"),
        (404, 'namespaces "nowhere" not found', "the namespace does not exist"),
        (404, 'mpijobs.kubeflow.org "of-namespaces" not found', "the cluster does not know MPIJobs"),
        (404, None, "the MPI Operator, v0.3 or newer, must be installed"),
        (
            404,
            "the server could not find the requested resource",
            "the MPI Operator, v0.3 or newer, must be installed",
        ),
        (422, 'MPIJob "x" is invalid: spec.slotsPerWorker', 'MPIJob "x" is invalid: spec.slotsPerWorker'),
    ],
)
def test_refusals_say_what_to_do(status: int, message: str | None, expected: str) -> None:
    said = explain(refusal(status, message), "create the MPIJob", "team", KINDS["mpijob"])
    assert said.startswith("cannot create the MPIJob in namespace team: ")
    assert expected in said
    assert "\n" not in said


@pytest.mark.parametrize(("status", "advised"), [(403, True), (422, False)])
def test_a_user_without_permission_learns_how_the_job_runs_without_it(status: int, advised: bool) -> None:
    said = 'networkpolicies is forbidden: User "u" cannot create resource "networkpolicies"'
    cluster = Cluster(None, "c", "team", "https://server")
    with (
        pytest.raises(ClusterError) as refused,
        cluster.asking("create the NetworkPolicy", "set the key to false"),
    ):
        raise refusal(status, said)
    assert str(refused.value).endswith(", or set the key to false") == advised
    assert said in str(refused.value)


def test_only_rbac_counts_as_not_being_allowed_to() -> None:
    assert lacks_permission(refusal(403, 'User "u" cannot create resource "pods" in API group ""'))
    assert not lacks_permission(refusal(403, "exceeded quota: small"))
    assert not lacks_permission(refusal(422, 'cannot create resource "pods"'))


def mpijob(*conditions: str, completed: bool = False, **metadata: str) -> dict[str, Any]:
    stamp = "2026-01-01T00:00:00Z"
    found = [
        {"type": kind, "status": "True", "lastTransitionTime": stamp, "message": f"{kind}'s message"}
        for kind in conditions
    ]
    status = {"conditions": found, **({"completionTime": stamp} if completed else {})}
    return {"metadata": {"creationTimestamp": stamp, **metadata}, "spec": {"runPolicy": {}}, "status": status}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            mpijob(),
            (
                "waiting: the MPI Operator has not started it yet (does the operator run, "
                "and watch this namespace?)"
            ),
        ),
        (mpijob("Created"), "waiting, for "),
        (mpijob("Created", "Running"), "running, for "),
        (
            mpijob("Created", "Running", "Failed"),
            "running, for ",
        ),  # an evicted worker makes the operator say so of a run that goes on
        (mpijob("Created", "Failed", completed=True), "failed, "),
        (mpijob("Created", "Failed", "Succeeded", completed=True), "succeeded, "),
        (mpijob("Created", "Suspended"), "suspended: "),
        (mpijob("Created", deletionTimestamp="2026-01-01T00:00:00Z"), "ending: "),
    ],
)
def test_the_state_is_one_word_and_its_reason(found: dict[str, Any], expected: str) -> None:
    assert state(KINDS["mpijob"], found).startswith(expected)


def test_a_failed_job_says_why() -> None:
    assert state(KINDS["mpijob"], mpijob("Failed", completed=True)).endswith(" ago: Failed's message")


def test_the_size_of_the_list_of_workers_is_counted_and_not_written() -> None:
    for nodes in (1, 2, 9, 10, 11, 99, 100, 101, 1000, 12345):
        assert _digits_below(nodes) == sum(len(str(worker)) for worker in range(nodes))
    assert _digits_below(2**63 - 1) > 2**63  # at once
