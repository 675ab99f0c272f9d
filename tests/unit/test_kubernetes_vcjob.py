"""Volcano's own Job: what its values become, what it refuses, its state in words."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.kubernetes_jobs import kubernetes_job, objects_of
from trainer.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_LEFT_OUT,
    EXIT_PREEMPTED,
    EXIT_START_AGAIN,
    EXIT_TIMED_OUT,
    InputError,
)
from trainer.launch.kubernetes.cluster import Cluster
from trainer.launch.kubernetes.kinds import KINDS
from trainer.launch.kubernetes.manifest import manifest
from trainer.launch.kubernetes.objects import _hand_over
from trainer.launch.kubernetes.pod_logs import output_lines
from trainer.launch.kubernetes.state import rows, state
from trainer.launch.kubernetes.validate import summary

ROW = KINDS["vcjob"]
THREE = {"global_batch_size": 4080}
"""A batch that one to three nodes can share."""
STAMP = "2026-01-01T00:00:00Z"


def rendered(**sections: Any) -> list[dict[str, Any]]:
    keys = {"kind": "vcjob", **sections.pop("kubernetes", {})}
    return objects_of(manifest(kubernetes_job(kubernetes=keys, **sections)))


def spec(**sections: Any) -> dict[str, Any]:
    found: dict[str, Any] = rendered(**sections)[-1]["spec"]
    return found


def test_pods_meet_at_a_service_that_has_the_pod_of_index_0_alone() -> None:
    *_, service, own = rendered()
    [task] = own["spec"]["tasks"]
    [container] = task["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["CLIPSHIP_SUPERVISORS"] == "first-run:29400"
    assert variables["MASTER_ADDR"] == service["metadata"]["name"] == "first-run"
    assert service["spec"]["selector"] == {
        "volcano.sh/job-name": "first-run",
        "volcano.sh/task-index": "0",
    }
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert "plugins" not in own["spec"], "Volcano's svc would delete a Service of this name"


def test_volcano_tells_a_pod_its_index_and_its_submission() -> None:
    [container] = spec()["tasks"][0]["template"]["spec"]["containers"]
    told = {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"]
        for each in container["env"]
        if "valueFrom" in each
    }
    assert told == {
        "JOB_COMPLETION_INDEX": "metadata.labels['volcano.sh/task-index']",
        "CLIPSHIP_LAUNCHER_JOB": "metadata.annotations['scheduling.k8s.io/group-name']",
    }


def action(policies: list[dict[str, Any]], code: int) -> str:
    """Returns what Volcano does with a pod that has failed with the code: the first policy that fits."""
    for each in policies:
        if each.get("exitCode") == code or each.get("event") == "PodFailed":
            return str(each["action"])
    return "SyncJob"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (EXIT_FAILED, "TerminateJob"),
        (EXIT_BAD_INPUT, "TerminateJob"),
        (EXIT_TIMED_OUT, "TerminateJob"),
        (EXIT_PREEMPTED, "RestartJob"),
        (EXIT_START_AGAIN, "RestartJob"),
        (EXIT_LEFT_OUT, "RestartPod"),
        (137, "RestartPod"),
    ],
)
def test_the_exit_code_says_whether_the_job_ends_or_who_starts_again(code: int, expected: str) -> None:
    assert action(spec()["policies"], code) == expected


def test_a_vcjob_is_a_gang_of_all_its_pods_in_the_queue_that_is_named() -> None:
    keys = {"gang_queue": "research", "priority_class": "high"}
    found = spec(kubernetes=keys, resources={"nodes": 3}, optim=THREE)
    assert (found["minAvailable"], found["tasks"][0]["replicas"]) == (3, 3)
    assert (found["queue"], found["priorityClassName"]) == ("research", "high")
    assert found["schedulerName"] == found["tasks"][0]["template"]["spec"]["schedulerName"] == "volcano"
    assert "minSuccess" not in found
    marks = found["tasks"][0]["template"]["metadata"]
    assert marks == {"labels": {"app.kubernetes.io/name": "clipship"}}, "Volcano names the PodGroup itself"


@pytest.mark.parametrize(
    ("recovery", "least"),
    [({"spare_nodes": 1}, 3), ({"min_nodes": 2}, 2), ({"spare_nodes": 2, "min_nodes": 1}, 1)],
)
def test_a_run_that_may_end_without_a_pod_does_not_ask_volcano_for_it(
    recovery: dict[str, int], least: int
) -> None:
    """Volcano counts who is done only while so many pods run or have ended."""
    found = spec(recovery={"max_restarts": 1, **recovery}, resources={"nodes": 3}, optim=THREE)
    [task] = found["tasks"]
    assert (found["minAvailable"], task["minAvailable"], found["minSuccess"]) == (least, least, 1)
    assert task["replicas"] == 3 + recovery.get("spare_nodes", 0)


def test_volcano_gives_up_only_after_every_restart_that_the_run_may_need() -> None:
    keys = {"backoff_limit": 2, "retries": 3}
    found = spec(kubernetes=keys, recovery={"max_restarts": 4}, resources={"nodes": 2})
    assert found["maxRetry"] == (2 + 4 + 3) * 2 + 1
    assert spec(kubernetes={"backoff_limit": 0, "retries": 0})["maxRetry"] == 1, "0 would mean 3"


@pytest.mark.parametrize(
    "keys",
    [
        {"queue": "gpu-queue"},
        {"gang": "volcano"},
        {"gang": "scheduler-plugins"},
        {"deadline_s": 60},
        {"launcher_start": "at-once"},
    ],
)
def test_what_a_vcjob_cannot_do_is_refused_with_the_kinds_that_can(keys: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=rf"kubernetes.{next(iter(keys))}: vcjobs have no use for it"
    ) as refused:
        rendered(kubernetes=keys)
    assert "set kubernetes.kind = " in str(refused.value)


def test_without_a_vcjob_or_volcano_a_queue_of_volcano_is_refused() -> None:
    with pytest.raises(InputError, match='gang_queue is for gang = "volcano"'):
        kubernetes_job(kubernetes={"kind": "job", "gang_queue": "research"})


def test_check_says_how_many_pods_volcano_starts() -> None:
    job = kubernetes_job(kubernetes={"kind": "vcjob"})
    assert summary(job) == "vcjob first-run, 2 pods, started by Volcano"


def api_object(phase: str | None, **metadata: str) -> dict[str, Any]:
    """A vcjob as Volcano writes it: its conditions have no type."""
    conditions = [{"status": "Pending", "lastTransitionTime": STAMP}]
    now = {"conditions": conditions, "state": {"phase": phase, "lastTransitionTime": STAMP}} if phase else {}
    return {
        "metadata": {"creationTimestamp": STAMP, "name": "first-run", "uid": "u-1", **metadata},
        "spec": {"tasks": [{"replicas": 2}]},
        "status": now,
    }


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (None, "waiting: Volcano has not started it yet"),
        ("Pending", "waiting, for "),
        ("Running", "running, for "),
        ("Restarting", "restarting, for "),
        ("Terminating", "failing, for "),
        ("Completing", "ending, for "),
        ("Aborted", "suspended, for "),
        ("Completed", "succeeded, "),
        ("Failed", "failed, "),
        ("Terminated", "failed, "),
        ("NewInV2", "newinv2, for "),
    ],
)
def test_the_phase_of_a_vcjob_in_words(phase: str | None, expected: str) -> None:
    assert state(ROW, api_object(phase)).startswith(expected)
    ended = expected.startswith(("succeeded", "failed"))
    assert ROW.ended_at(api_object(phase)) == (STAMP if ended else None)
    assert (ROW.succeeded in ROW.conditions(api_object(phase))) == (phase == "Completed")


def test_objects_beside_a_vcjob_belong_to_a_job_of_volcano() -> None:
    patched: list[Any] = []
    service = {"metadata": {"name": "first-run", "labels": {"app.kubernetes.io/name": "clipship"}}}
    core = SimpleNamespace(
        read_namespaced_service=lambda *_: service,
        patch_namespaced_service=lambda _name, _namespace, body: patched.append(body),
    )
    _hand_over(cast(Cluster, _Cluster(core)), ROW, ("v1", "Service"), api_object("Running"))
    [reference] = patched[0]["metadata"]["ownerReferences"]
    assert (reference["apiVersion"], reference["kind"]) == ("batch.volcano.sh/v1alpha1", "Job")


class _Cluster(SimpleNamespace):
    """The part of a cluster that these tests ask."""

    def __init__(self, core: Any, **parts: Any) -> None:
        super().__init__(core=core, namespace="team", **parts)

    def asking(self, *_: Any, **__: Any) -> Any:
        return nullcontext()

    def plain(self, item: Any) -> Any:
        return item


def test_status_has_the_last_word_of_any_pod_if_the_first_one_is_gone() -> None:
    """Volcano deletes the pods that still run when another has ended the job."""
    ended = {"exitCode": 1, "message": "rank 1 ended the run"}
    labels = {"volcano.sh/task-index": "1"}
    left = {
        "metadata": {"name": "first-run-worker-1", "creationTimestamp": STAMP, "labels": labels},
        "status": {"phase": "Failed", "containerStatuses": [{"state": {"terminated": ended}}]},
    }
    core = SimpleNamespace(
        list_namespaced_pod=lambda *_, **__: SimpleNamespace(items=[left]),
        list_namespaced_event=lambda *_, **__: SimpleNamespace(items=[]),
    )
    cluster: Any = _Cluster(core)
    said = rows(cluster, ROW, "first-run", api_object("Terminated"), visible=True)
    assert ("message", "exit code 1: rank 1 ended the run") in said


def test_logs_show_a_pod_and_then_its_successor_of_the_same_name() -> None:
    """Volcano gives a pod that it starts again the name of the one before."""
    pods = [{"uid": "p-1", "text": b"first\n"}, {"uid": "p-2", "text": b"second\n"}]
    now = iter([0, 0, 1, 1, 1])
    current = pods[0]

    def listed(*_: Any, **__: Any) -> Any:
        nonlocal current
        current = pods[next(now, 1)]
        metadata = {"name": "first-run-worker-0", "uid": current["uid"], "creationTimestamp": STAMP}
        labels = {"volcano.sh/task-index": "0"}
        return SimpleNamespace(
            items=[{"metadata": {**metadata, "labels": labels}, "status": {"phase": "Failed"}}]
        )

    def log(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(stream=lambda amt: [current["text"]])

    core = SimpleNamespace(list_namespaced_pod=listed, read_namespaced_pod_log=log)
    cluster: Any = _Cluster(core, read=lambda *_: api_object("Failed"))
    assert list(output_lines(cluster, ROW, "first-run", follow=True)) == ["first", "second"]
