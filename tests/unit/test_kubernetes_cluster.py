"""`submit`, `status` and `logs` with answers of an API server that a real one does not give at will.

tests/cluster/kubernetes has a real one.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("kubernetes")
from kubernetes.config import kube_config
from kubernetes.stream.ws_client import WebSocketConnectionClosedException

from tests.support.kubernetes_jobs import kubernetes_job
from tests.support.stub_cluster import STAMP, Refusal, StubCluster, stub_cluster
from trainer.cli.main import main
from trainer.config.loader import dump_job

NAME = "first-run"
API_VERSIONS = {"job": "batch/v1", "mpijob": "kubeflow.org/v2beta1"}
LABELS = {"app.kubernetes.io/name": "clipship"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubCluster]:
    """The cluster of the kubeconfig, in a working folder with nothing else in it; nobody waits for it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    monotonic, slept = time.monotonic, [0.0]
    monkeypatch.setattr("time.sleep", lambda seconds: slept.append(slept[-1] + seconds))
    monkeypatch.setattr("time.monotonic", lambda: monotonic() + slept[-1])
    with stub_cluster(tmp_path / "config") as found:
        found.objects["persistentvolumeclaims", "scratch"] = {"kind": "PersistentVolumeClaim"}
        yield found


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command; returns its exit code, and all that it printed in one line."""

    def run(*words: str) -> tuple[int, str]:
        code = main(list(words))
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return run


def write_job(kind: str = "job", **sections: Any) -> None:
    keys = {"kind": kind, **sections.pop("kubernetes", {})}
    Path("job.toml").write_text(dump_job(kubernetes_job(kubernetes=keys, **sections)))


SUBMIT = ("submit", "job.toml", "--to", "kubernetes")
Told = Callable[..., tuple[int, str]]


# What a cluster refuses


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (401, "Unauthorized", "the cluster does not know you"),
        (
            403,
            'mpijobs is forbidden: User "u" cannot create resource "x"',
            "you lack the permission: mpijobs",
        ),
        (403, 'pods "x" is forbidden: exceeded quota: small, requested: cpu=8', "it would exceed the quota"),
        (
            403,
            'pods "x" is forbidden: failed quota: team: must specify limits.cpu for: launcher',
            'kubernetes.patch.launcher.spec.containers = [{ name = "launcher", resources.limits.cpu = ',
        ),
        (403, 'pods "x" is forbidden: violates PodSecurity "a"', "the namespace's pod security forbids it"),
        (404, 'namespaces "nowhere" not found', "the namespace does not exist"),
        (404, "the server could not find the requested resource", "the cluster does not know MPIJobs"),
        (404, None, "the MPI Operator, v0.3 or newer, must be installed"),
        (422, 'MPIJob "x" is invalid: spec.slotsPerWorker', 'MPIJob "x" is invalid: spec.slotsPerWorker'),
    ],
)
def test_a_refusal_says_what_to_do(
    cluster: StubCluster, told: Told, status: int, message: str | None, expected: str
) -> None:
    write_job("mpijob")
    cluster.says("get mpijobs", Refusal(status, message))
    code, said = told("status", "job.toml")
    assert code == 2
    why = said.partition("its cluster could not be asked: ")[2]
    assert why.startswith("cannot read the MPIJob in namespace team: ")
    assert expected in why
    assert why.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "message", "advised"),
    [
        (403, 'networkpolicies is forbidden: User "u" cannot create resource "networkpolicies"', True),
        (403, "exceeded quota: small", False),
        (422, 'User "u" cannot create resource "networkpolicies"', False),
    ],
)
def test_only_who_lacks_a_permission_learns_how_the_job_runs_without_it(
    cluster: StubCluster, told: Told, status: int, message: str, advised: bool
) -> None:
    write_job()
    cluster.says("post networkpolicies", Refusal(status, message))
    code, said = told(*SUBMIT)
    assert code == 1
    assert message in said
    assert ("or set kubernetes.network_policy = false" in said) == advised


def test_pods_that_may_not_be_tried_are_a_warning(cluster: StubCluster, told: Told) -> None:
    write_job()
    cluster.says("post pods", Refusal(403, 'User "u" cannot create resource "pods"'))
    code, said = told(*SUBMIT)
    assert (code, "you lack the permission to create pods, so they could not be tried" in said) == (0, True)


UNSEEN = Refusal(422, "trainingRuntime must be created before the TrainJob is created")
OF_KUEUE = Refusal(403, "runtime 'first-run-job' not found")


@pytest.mark.parametrize(
    ("kind", "answers", "refused"),
    [
        ("trainjob", (UNSEEN, UNSEEN, UNSEEN, None), ""),
        ("trainjob", (OF_KUEUE, None), ""),
        ("trainjob", (UNSEEN,), "must be created before"),
        ("trainjob", (Refusal(403, "exceeded quota: small"),), "quota"),
        ("trainjob", (None, Refusal(403, "forbidden")), "forbidden"),
        ("job", (UNSEEN,), "must be created before"),
    ],
)
def test_a_trainjob_is_created_as_soon_as_its_controller_has_seen_the_runtime(
    cluster: StubCluster, told: Told, kind: str, answers: tuple[Any, ...], refused: str
) -> None:
    """In the dry run, its runtime does not exist yet; it is strict, as a cluster drops keys that it lacks."""
    write_job(kind)
    cluster.says(f"post {kind}s", *answers)
    code, said = told(*SUBMIT)
    assert (code, refused in said) == (bool(refused), True)
    assert (len(cluster.asked(f"post {kind}s")) > 50) == (kind == "trainjob" and answers == (UNSEEN,))
    assert Path("runs", NAME).exists() == (not refused)
    first = next(each for each in cluster.requests if each.asked == "post configmaps")
    assert first.query == {"dryRun": "All", "fieldValidation": "Strict"}


@pytest.mark.parametrize("lasts", [False, True])
def test_a_runtime_that_is_being_deleted_is_waited_for_and_not_replaced(
    cluster: StubCluster, told: Told, lasts: bool
) -> None:
    """Replacing it would take the finalizer away that holds it, and the new job's runtime with it."""
    write_job("trainjob")
    going = {"metadata": {"name": "first-run-job", "deletionTimestamp": STAMP, "labels": LABELS}}
    cluster.says("post trainingruntimes", Refusal(409, "exists"), None)
    cluster.says("get trainingruntimes", going, *([] if lasts else [going, None]))
    code, said = told(*SUBMIT)
    assert code == lasts
    assert ("TrainingRuntime first-run-job is still being deleted after 20 s" in said) == lasts
    assert not cluster.asked("put trainingruntimes")


def config(*owners: str) -> dict[str, Any]:
    references = [
        {"apiVersion": API_VERSIONS[kind.lower()], "kind": kind, "name": NAME, "uid": "0"} for kind in owners
    ]
    named = {"name": "first-run-job", "labels": LABELS, "resourceVersion": "7"}
    metadata = {**named, "ownerReferences": references}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}


@pytest.mark.parametrize(
    ("kind", "found", "refused"),
    [
        ("mpijob", config("Job"), "belongs to the Job first-run, whose pods would get another job"),
        ("job", config("MPIJob"), "belongs to the MPIJob first-run, whose pods would get another job"),
        ("job", {"metadata": {"name": "first-run-job"}}, "first-run-job that Clipship did not make"),
        ("job", config(), ""),
        ("job", config("Job"), ""),
    ],
)
def test_what_is_beside_a_job_of_this_kind_is_replaced_and_what_another_has_stays(
    cluster: StubCluster, told: Told, kind: str, found: dict[str, Any], refused: str
) -> None:
    write_job(kind)
    cluster.says("post configmaps", Refusal(409, "exists"))
    cluster.says("get configmaps", found)
    code, said = told(*SUBMIT)
    assert (code, refused in said) == (bool(refused), True)
    changes = [each.asked for each in cluster.asked("put configmaps", "patch configmaps")]
    assert changes == ([] if refused else ["put configmaps", "patch configmaps"])


# What is said of a job


def api_object(*conditions: str, **parts: Any) -> dict[str, Any]:
    found = [
        {"type": kind, "status": "True", "lastTransitionTime": STAMP, "message": f"{kind}'s message"}
        for kind in conditions
    ]
    metadata = {"name": NAME, "uid": "u-1", "creationTimestamp": STAMP, "labels": LABELS}
    return {
        "metadata": metadata | parts.pop("metadata", {}),
        "spec": {"parallelism": 2, "runPolicy": {}},
        "status": {"conditions": found, **parts},
    }


def pod(name: str, index: int = 0, **status: Any) -> dict[str, Any]:
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    metadata = {"name": name, "uid": name, "creationTimestamp": STAMP, "labels": labels}
    return {"metadata": metadata, "spec": {}, "status": {"phase": "Failed", **status}}


def has(cluster: StubCluster, kind: str, found: dict[str, Any], *pods: dict[str, Any]) -> None:
    """Lets the cluster have the job, as `kubectl` made it, and these pods."""
    replicas = {"mpiReplicaSpecs": {"Worker": {"replicas": 2}}} if kind == "mpijob" else {}
    spec = {**found["spec"], **replicas, "trainer": {"numNodes": 2}}
    cluster.objects[f"{kind}s", NAME] = {**found, "spec": spec}
    cluster.says("get pods", {"items": list(pods)})
    write_job(kind)


STARTED = {"startTime": STAMP}
ENDED = {"completionTime": STAMP}


@pytest.mark.parametrize(
    ("kind", "found", "expected"),
    [
        ("job", api_object(), "waiting: Kubernetes has not started it yet"),
        ("job", api_object(**STARTED), "waiting, for "),
        ("job", api_object(**STARTED, ready=2), "running, for "),
        ("job", api_object("Suspended"), "suspended: "),
        ("job", api_object("SuccessCriteriaMet", "Complete", **STARTED), "succeeded, "),
        ("job", api_object("FailureTarget", "Failed", **STARTED), "failed, "),
        ("mpijob", api_object(), "waiting: the MPI Operator has not started it yet (does the operator run"),
        ("mpijob", api_object("Created"), "waiting, for "),
        ("mpijob", api_object("Created", "Running"), "running, for "),
        # an evicted worker makes the operator say so of a run that goes on
        ("mpijob", api_object("Created", "Running", "Failed"), "running, for "),
        ("mpijob", api_object("Created", "Failed", **ENDED), "failed, "),
        ("mpijob", api_object("Created", "Failed", "Succeeded", **ENDED), "succeeded, "),
        ("mpijob", api_object("Created", "Suspended"), "suspended: "),
        ("mpijob", api_object("Created", metadata={"deletionTimestamp": STAMP}), "ending: "),
    ],
)
def test_the_state_is_one_word_and_its_reason(
    cluster: StubCluster, told: Told, kind: str, found: dict[str, Any], expected: str
) -> None:
    has(cluster, kind, found)
    _, said = told("status", "job.toml")
    assert f"\nstate       {expected}" in said
    assert ("Failed's message\n" in said) == expected.startswith("failed")


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        ([], "waiting: Kubeflow Trainer has not started it yet"),
        ([False, False], "waiting, for "),
        ([True, False], "running, for "),
    ],
)
def test_a_trainjob_without_a_status_is_in_the_state_of_its_pods(
    cluster: StubCluster, told: Told, ready: list[bool], expected: str
) -> None:
    pods = [pod("a", conditions=[{"type": "Ready", "status": str(each)}]) for each in ready]
    has(cluster, "trainjob", api_object(), *pods)
    assert f"\nstate       {expected}" in told("status", "job.toml")[1]


def test_status_has_the_last_word_of_any_pod_if_that_of_index_0_is_gone(
    cluster: StubCluster, told: Told
) -> None:
    """Kubernetes deletes the pods that still run when another has failed the Job."""
    ended = {"exitCode": 1, "message": "rank 1 ended the run"}
    left = pod("first-run-1-abcde", 1, containerStatuses=[{"state": {"terminated": ended}}])
    has(cluster, "job", api_object("Failed"), left)
    assert "message     exit code 1: rank 1 ended the run\n" in told("status", "job.toml")[1]


def test_status_of_an_mpijob_has_its_launcher_and_its_workers(cluster: StubCluster, told: Told) -> None:
    ended = {"exitCode": 1, "message": "rank 3 ended the run"}
    first = pod("l-0", containerStatuses=[{"state": {"terminated": ended}}])
    last = pod("l-1", phase="Running")
    for launcher in (first, last):
        launcher["metadata"]["labels"] = {"training.kubeflow.org/job-role": "launcher"}
    worker = pod("w-0", phase="Running", conditions=[{"type": "Ready", "status": "True"}])
    has(cluster, "mpijob", api_object("Created", "Running"), first, last, worker)
    said = told("status", "job.toml")[1]
    assert "launcher    l-1, running, number 2 of this job\n" in said
    assert "message     exit code 1: rank 3 ended the run\n" in said
    assert "workers     1 of 2 ready\n" in said


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (api_object(**STARTED), "is deleted; its ranks save and exit within 45 s (kubernetes.grace_s)"),
        (api_object("Failed", **STARTED), "had ended; it is deleted, together with its pods' logs"),
    ],
    ids=["running", "ended"],
)
def test_cancel_deletes_the_job_with_what_kubectl_made_beside_it(
    cluster: StubCluster, told: Told, found: dict[str, Any], said: str
) -> None:
    runs = pod("a")
    runs["spec"]["terminationGracePeriodSeconds"] = 45
    has(cluster, "job", found, runs)
    cluster.says("get configmaps", config())
    code, shown = told("cancel", "job.toml")
    assert (code, f"Job team/first-run {said}" in shown) == (0, True), shown
    changes = [each.asked for each in cluster.asked("patch configmaps", "delete jobs")]
    assert changes == ["patch configmaps", "delete jobs"]
    code, shown = told("cancel", "job.toml")
    assert "Job team/first-run does not exist any more" in shown


QUEUED = api_object("Suspended", metadata={"labels": LABELS | {"kueue.x-k8s.io/queue-name": "gpu-queue"}})


def workload(**condition: str) -> dict[str, Any]:
    return {"items": [{"status": {"conditions": [condition]}}]}


WAITS = workload(type="QuotaReserved", status="False", message="insufficient unused quota for cpu")
ADMITTED = workload(type="QuotaReserved", status="True", message="Quota reserved in ClusterQueue team")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((WAITS,), "gpu-queue: insufficient unused quota for cpu"),
        ((Refusal(404, None), WAITS), "gpu-queue: insufficient unused quota for cpu"),
        (({"items": []},), "gpu-queue: Kueue does not know the job (does it run, and watch this namespace?)"),
        ((ADMITTED,), None),
        ((Refusal(404, None),), None),
        ((Refusal(403, "forbidden"), WAITS), None),
    ],
    ids=["waits", "older", "unseen", "admitted", "no-kueue", "forbidden"],
)
def test_status_says_what_a_job_in_a_queue_waits_for(
    cluster: StubCluster, told: Told, answers: tuple[Any, ...], expected: str | None
) -> None:
    found = {**QUEUED, "spec": {**QUEUED["spec"], "suspend": True, "runPolicy": {"suspend": True}}}
    has(cluster, "mpijob", found)
    cluster.says("get workloads", *answers)
    _, said = told("status", "job.toml")
    shown = [line[12:] for line in said.splitlines() if line.startswith("queue ")]
    assert shown == ([] if expected is None else [expected])
    queries = {each.query["labelSelector"] for each in cluster.asked("get workloads")}
    assert queries == {"kueue.x-k8s.io/job-uid=u-1"}


@pytest.mark.parametrize("blocked", ["artefacts", "artefacts/submission.env/a"], ids=["folder", "file"])
def test_an_object_that_kubectl_made_is_known_where_no_record_can_be_written(
    cluster: StubCluster, told: Told, blocked: str
) -> None:
    has(cluster, "job", api_object())
    where = Path("runs", NAME, blocked)
    where.parent.mkdir(parents=True)
    where.touch()
    code, said = told("status", "job.toml")
    assert (code, "run         runs/first-run\nstate       waiting: Kubernetes has not" in said) == (0, True)


# Logs


def test_a_log_whose_stream_breaks_off_is_shown_whole_and_once(cluster: StubCluster, told: Told) -> None:
    """Also two lines of the same time, of which the break parts one from the other, and what has no time."""
    stamps = ("01.000000001", "01.000000002", "01.000000002", "02.100000000", "03.000000000")
    lines = [f"2026-11-30T10:00:{stamp}Z line {number}\n" for number, stamp in enumerate(stamps)]
    streams = [lines[:2], ["unable to retrieve container logs\n"], [*lines[:4], lines[4][:-1]]]
    going, ended = pod("a", containerStatuses=[{"state": {"running": {}}}]), pod("a")
    has(cluster, "job", api_object("Failed"))
    cluster.says("get pods", *([{"items": [each]} for each in (going, going, going, ended)]))
    cluster.says("get log", *map("".join, streams))
    code, said = told("logs", "job.toml", "-f")
    shown = ["line 0", "line 1", "unable to retrieve container logs", "line 2", "line 3", "line 4"]
    assert (code, said.splitlines()) == (0, shown)
    assert {each.query["follow"] for each in cluster.asked("get log")} == {"true"}


def test_logs_show_the_pod_of_index_0_and_then_its_successor(cluster: StubCluster, told: Told) -> None:
    first, second, other = pod("run-0-a"), pod("run-0-b"), pod("run-1-c", 1)
    has(cluster, "job", api_object("Failed"))
    seen = ([first, other], [first, other], [first, second])
    cluster.says("get pods", *({"items": pods} for pods in seen))
    cluster.says("get log", lambda request: f"of {request.name}\n")
    assert told("logs", "job.toml", "-f") == (0, "of run-0-a\nof run-0-b\n")


class _Answer:
    """Answers as the client does for a command in a pod: with its output at once, then with its end."""

    def __init__(self, code: "int | Exception", errors: str = "") -> None:
        self._code, self._errors, self._open = code, errors, True
        self.sock = SimpleNamespace(shutdown=lambda: None)

    def is_open(self) -> bool:
        was, self._open = self._open, False
        return was

    def update(self, timeout: float) -> None:
        if isinstance(self._code, WebSocketConnectionClosedException):
            raise self._code

    def read_stdout(self, timeout: float) -> str:
        return "step 1\nstep 2"

    def read_stderr(self, timeout: float) -> str:
        return self._errors

    @property
    def returncode(self) -> int:
        if isinstance(self._code, Exception):
            raise self._code
        return self._code

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("follow", "answer", "said"),
    [
        (False, _Answer(0), ""),
        (True, _Answer(137), ""),  # tail was killed with its pod
        (False, _Answer(1, "tail: no file\n"), "rank 3's log cannot be read in pod clip-0: tail: no file"),
        (False, _Answer(137), "rank 3's log cannot be read in pod clip-0: exit code 137"),
        (False, _Answer(WebSocketConnectionClosedException("lost")), "connection to pod clip-0 ended: lost"),
        (False, _Answer(TypeError("no status")), "the connection to pod clip-0 ended: no status"),
    ],
    ids=["whole", "followed", "no file", "killed", "connection lost", "no status"],
)
def test_a_ranks_log_ends_with_its_command_or_its_pod_or_says_why_it_cannot_be_read(
    cluster: StubCluster,
    told: Told,
    monkeypatch: pytest.MonkeyPatch,
    follow: bool,
    answer: _Answer,
    said: str,
) -> None:
    monkeypatch.setattr("trainer.launch.kubernetes.pod_logs.stream", lambda *_, **__: answer)
    has(cluster, "job", api_object(**STARTED), pod("clip-0", phase="Running"))
    code, shown = told("logs", "job.toml", "--rank", "3", *(["-f"] if follow else []))
    assert code == bool(said)
    assert said in shown
    assert bool(said) or shown == "step 1\nstep 2\n"


# Kubeconfigs that are none: each is named, and none is waited for

WRONG: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a link to what has no end": lambda path: path.symlink_to("/dev/zero"),
    "no YAML": lambda path: path.write_text("a: [\n"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "a list": lambda path: path.write_text("[1, 2]"),
    "depth": lambda path: path.write_text("[" * 1_000),
    "a context that is none": lambda path: path.write_text(
        "contexts: [{name: a, context: 5}]\ncurrent-context: a\nusers: []\nclusters: []\n"
    ),
    "nothing": lambda path: path.write_text(""),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_kubeconfig_that_is_none_is_named(
    cluster: StubCluster, told: Told, tmp_path: Path, kind: str
) -> None:
    write_job()
    (tmp_path / "config").unlink()
    WRONG[kind](tmp_path / "config")
    code, said = told("status", "job.toml")
    assert code == 2
    why = said.partition("its cluster could not be asked: ")[2]
    assert "kubeconfig" in why.replace("-", "")
    assert len(why) < 600


def test_a_page_in_place_of_the_api_is_told(cluster: StubCluster, told: Told) -> None:
    """As a proxy answers whose user has not signed in."""
    write_job()
    cluster.says("get jobs", "<html>Sign in</html>" * 100)
    code, said = told(*SUBMIT)
    assert (code, "no API server but sends '<html>Sign in" in said) == (1, True)
    assert len(said) < 900
