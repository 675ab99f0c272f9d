"""The Indexed Job: what its values become, what it refuses, its state in words."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.support.kubernetes_jobs import HOROVOD, kubernetes_job, objects_of
from trainer.config import Job
from trainer.errors import (
    ClusterError,
    InputError,
)
from trainer.launch.kubernetes import objects as kubernetes_objects
from trainer.launch.kubernetes import pod_logs
from trainer.launch.kubernetes.kinds import KINDS
from trainer.launch.kubernetes.manifest import manifest
from trainer.launch.kubernetes.objects import _create_own, _staying, _try_own, try_all
from trainer.launch.kubernetes.state import rows, state
from trainer.launch.kubernetes.validate import summary


def indexed(**sections: Any) -> Job:
    """A job that runs as an Indexed Job; keys of a section replace the usual ones."""
    keys = {"kind": "job", **sections.pop("kubernetes", {})}
    return kubernetes_job(kubernetes=keys, **sections)


def objects(job: Job) -> dict[str, Any]:
    return {item["kind"]: item for item in objects_of(manifest(job))}


@pytest.mark.parametrize(
    ("comm", "kind"),
    [
        ({}, "Job"),
        ({"backend": "fsdp"}, "Job"),
        ({"launcher": "clipship"}, "Job"),
        ({"launcher": "mpirun"}, "MPIJob"),
        (HOROVOD, "MPIJob"),
    ],
)
def test_without_a_kind_a_job_gets_one_that_can_start_its_ranks(comm: dict[str, Any], kind: str) -> None:
    job = kubernetes_job(comm=comm, kubernetes={"kind": None})
    assert kind in objects(job)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"comm": {**HOROVOD, "horovod": {"cpu_operations": "mpi"}}},
            "comm.horovod.cpu_operations = mpi cannot be with Jobs, where each pod starts its own",
        ),
        ({"comm": {"launcher": "mpirun"}}, "each pod starts its own; use auto or clipship"),
        (
            {"kubernetes": {"launcher_start": "at-once"}},
            "kubernetes.launcher_start: Jobs have no use for it",
        ),
        (
            {"kubernetes": {"patch": {"launcher": {"spec": {"nodeName": "a"}}}}},
            'patch.launcher: Jobs have no use for it: leave it out, or set kubernetes.kind = "mpijob"',
        ),
    ],
)
def test_what_an_indexed_job_cannot_do_is_refused_with_the_fix(
    sections: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InputError) as refused:
        manifest(indexed(**sections))
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_check_says_how_many_pods_there_are() -> None:
    job = indexed(recovery={"max_restarts": 1, "spare_nodes": 2})
    assert summary(job) == "Job first-run, 4 pods, started by Kubernetes"


def api_object(*conditions: str, **status: Any) -> dict[str, Any]:
    stamp = "2026-01-01T00:00:00Z"
    found = [
        {"type": kind, "status": "True", "lastTransitionTime": stamp, "message": f"{kind}'s message"}
        for kind in conditions
    ]
    return {
        "metadata": {"creationTimestamp": stamp},
        "spec": {},
        "status": {"conditions": found, **status},
    }


STARTED = {"startTime": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (api_object(), "waiting: Kubernetes has not started it yet"),
        (api_object(**STARTED), "waiting, for "),
        (api_object(**STARTED, ready=2), "running, for "),
        (api_object("Suspended"), "suspended: "),
        (api_object("SuccessCriteriaMet", "Complete", **STARTED), "succeeded, "),
        (api_object("FailureTarget", "Failed", **STARTED), "failed, "),
    ],
)
def test_the_state_is_one_word_and_its_reason(found: dict[str, Any], expected: str) -> None:
    assert state(KINDS["job"], found).startswith(expected)


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        ([], "waiting: Kubeflow Trainer has not started it yet"),
        ([False, False], "waiting, for "),
        ([True, False], "running, for "),
    ],
)
def test_a_trainjob_without_a_status_is_in_the_state_of_its_pods(ready: list[bool], expected: str) -> None:
    pods = [
        {**api_object(), "status": {"conditions": [{"type": "Ready", "status": str(each)}]}} for each in ready
    ]
    assert state(KINDS["trainjob"], api_object(), pods).startswith(expected)


UNSEEN = ClusterError("trainingRuntime must be created before the TrainJob is created")


def answering(*answers: object) -> Any:
    """A cluster with these answers to requests to create an object; the last one is given again and again."""
    left = [*answers]

    def create(*_: object, **__: object) -> object:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SimpleNamespace(create=create)


def test_a_trainjob_is_tried_although_its_runtime_exists_in_a_dry_run_only() -> None:
    _try_own(answering(UNSEEN), KINDS["trainjob"], {})
    _try_own(answering(ClusterError("runtime 'first-run-job' not found")), KINDS["trainjob"], {})  # Kueue's
    with pytest.raises(ClusterError, match="quota"):
        _try_own(answering(ClusterError("quota")), KINDS["trainjob"], {})
    with pytest.raises(ClusterError, match="must be created"):
        _try_own(answering(UNSEEN), KINDS["job"], {})


def test_a_trainjob_is_created_as_soon_as_its_controller_has_seen_the_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kubernetes_objects, "_POLL_S", 0.0)
    made = {"kind": "TrainJob"}
    assert _create_own(answering(UNSEEN, UNSEEN, made), KINDS["trainjob"], {}) == made
    with pytest.raises(ClusterError, match="forbidden"):
        _create_own(answering(ClusterError("forbidden")), KINDS["trainjob"], {})
    monkeypatch.setattr(kubernetes_objects, "_WAIT_S", 0.0)
    with pytest.raises(ClusterError, match="must be created"):
        _create_own(answering(UNSEEN), KINDS["trainjob"], {})


def test_a_runtime_that_is_being_deleted_is_waited_for_and_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replacing it would take the finalizer away that holds it, and the new job's runtime with it."""
    going = {"metadata": {"name": "x-job", "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    monkeypatch.setattr(kubernetes_objects, "_POLL_S", 0.0)
    monkeypatch.setattr(kubernetes_objects, "_read", answering(going, going, None).create)
    runtime = ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime")
    assert _staying(answering(None), runtime, "x-job") is None
    monkeypatch.setattr(kubernetes_objects, "_WAIT_S", 0.0)
    monkeypatch.setattr(kubernetes_objects, "_read", answering(going).create)
    with pytest.raises(ClusterError, match="TrainingRuntime x-job is still being deleted after 0 s"):
        _staying(answering(None), runtime, "x-job")


def test_a_field_that_the_cluster_would_drop_without_a_word_is_refused_in_the_dry_run() -> None:
    """Such as a gang of Volcano in a TrainingRuntime, on Kubeflow Trainer v2.0."""
    cluster = MagicMock()
    *beside, wanted = objects_of(manifest(kubernetes_job(kubernetes={"kind": "trainjob"})))
    try_all(cluster, KINDS["trainjob"], beside, wanted, taken=False)
    [runtime] = [call for call in cluster.ask.call_args_list if "trainingruntimes" in call.args]
    assert runtime.kwargs == {"dryRun": "All", "fieldValidation": "Strict"}


STAMP = "2026-01-01T00:00:00Z"
FAILED_JOB = {
    "metadata": {"creationTimestamp": STAMP, "name": "first-run"},
    "spec": {"parallelism": 2},
    "status": {"conditions": [{"type": "Failed", "status": "True", "lastTransitionTime": STAMP}]},
}


def pod(name: str, index: int, **status: Any) -> dict[str, Any]:
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    metadata = {"name": name, "uid": name, "creationTimestamp": STAMP, "labels": labels}
    return {"metadata": metadata, "status": {"phase": "Failed", **status}}


def cluster(*listings: list[dict[str, Any]], **methods: Any) -> Any:
    """A cluster with one list of pods after the other, of which the last one stays."""
    left = list(listings)

    def listed(_method: str, _version: str, plural: str, **_: Any) -> Any:
        if plural == "events":
            return {"items": []}
        return {"items": left.pop(0) if len(left) > 1 else left[0]}

    return SimpleNamespace(
        core=SimpleNamespace(**methods),
        namespace="team",
        asking=lambda *_, **__: nullcontext(),
        ask=listed,
        read=lambda *_: FAILED_JOB,
    )


def test_status_has_the_last_word_of_any_pod_if_that_of_index_0_is_gone() -> None:
    """Kubernetes deletes the pods that still run when another has failed the Job."""
    ended = {"exitCode": 1, "message": "rank 1 ended the run"}
    left = pod("first-run-1-abcde", 1, containerStatuses=[{"state": {"terminated": ended}}])
    asked = cluster([left])
    said = rows(asked, KINDS["job"], "first-run", FAILED_JOB, visible=True)
    assert ("message", "exit code 1: rank 1 ended the run") in said


def test_a_log_whose_stream_breaks_off_is_shown_whole_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also two lines of the same time, of which the break parts one from the other, and what has no time."""
    monkeypatch.setattr("trainer.launch.kubernetes.pod_logs.time.sleep", lambda _: None)
    stamps = ("01.000000001", "01.000000002", "01.000000002", "02.100000000", "03.000000000")
    lines = [f"2026-11-30T10:00:{stamp}Z line {number}\n" for number, stamp in enumerate(stamps)]
    streams = [lines[:2], ["unable to retrieve container logs\n"], [*lines[:4], lines[4][:-1]]]

    def log(*_: Any, **asked: Any) -> Any:
        assert asked["follow"]
        text = "".join(streams.pop(0)).encode()
        return SimpleNamespace(stream=lambda amt: [text[:40], text[40:]])

    runs: dict[str, Any] = {"containerStatuses": [{"state": {"running": {}}}]}
    going, ended = pod("run-0-a", 0, **runs), pod("run-0-a", 0)
    asked = cluster([going], [going], [going], [ended], read_namespaced_pod_log=log)
    shown = list(pod_logs.output_lines(asked, KINDS["job"], "first-run", follow=True))
    assert shown == ["line 0", "line 1", "unable to retrieve container logs", "line 2", "line 3", "line 4"]


def test_logs_show_the_pod_of_index_0_and_then_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.launch.kubernetes.pod_logs.time.sleep", lambda _: None)
    first, second, other = pod("run-0-a", 0), pod("run-0-b", 0), pod("run-1-c", 1)

    def log(name: str, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(stream=lambda amt: [f"of {name}\n".encode()])

    both = [first, other, second]
    asked = cluster([first, other], [first, other], both, read_namespaced_pod_log=log)
    lines = pod_logs.output_lines(asked, KINDS["job"], "first-run", follow=True)
    assert list(lines) == ["of run-0-a", "of run-0-b"]
