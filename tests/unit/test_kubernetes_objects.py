"""Objects beside a job's own, and the log of a rank, of a cluster that answers as these tests say."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kubernetes.client.exceptions import ApiException
from kubernetes.stream.ws_client import WebSocketConnectionClosedException

from tests.support.jobs import tiny_job
from trainer.errors import ClusterError
from trainer.launch.kubernetes import pod_logs
from trainer.launch.kubernetes.cluster import Cluster
from trainer.launch.kubernetes.kinds import KINDS
from trainer.launch.kubernetes.objects import _hand_over, _put
from trainer.launch.kubernetes.scheduler import KubernetesScheduler
from trainer.launch.submission import Submission

CONFIG = ("v1", "ConfigMap")
LABELS = {"app.kubernetes.io/name": "clipship"}
NAME = {"name": "clip", "uid": "2"}


def owner(api_version: str, kind: str) -> dict[str, str]:
    return {"apiVersion": api_version, "kind": kind, "name": "clip", "uid": "1"}


def config(*owners: dict[str, str]) -> dict[str, Any]:
    metadata = {"name": "clip-job", "labels": LABELS, "resourceVersion": "7", "ownerReferences": list(owners)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}


class _Namespace:
    """A namespace that has one ConfigMap, as the API server answers for it."""

    def __init__(self, item: dict[str, Any]) -> None:
        self.item, self.changes = item, list[str]()

    def ask(self, method: str, *_: Any) -> dict[str, Any]:
        if method == "post":
            raise ApiException(status=409)
        if method != "get":
            self.changes.append(method)
        return self.item


def cluster_of(**methods: Any) -> Cluster:
    def asking(*_: Any, **__: Any) -> Any:
        return nullcontext()

    return cast(Cluster, SimpleNamespace(namespace="team", asking=asking, **methods))


@pytest.mark.parametrize(
    ("kind", "api_version", "of"),
    [("mpijob", "batch/v1", "Job"), ("job", "kubeflow.org/v2beta1", "MPIJob")],
)
def test_what_belongs_to_a_job_of_another_kind_stays_with_it(kind: str, api_version: str, of: str) -> None:
    one = _Namespace(config(owner(api_version, of)))
    with pytest.raises(ClusterError, match=f"belongs to the {of} clip, whose pods would get another job"):
        _put(cluster_of(ask=one.ask), config(), KINDS[kind])
    _hand_over(cluster_of(ask=one.ask), KINDS[kind], CONFIG, {"metadata": NAME})
    assert one.changes == []


@pytest.mark.parametrize("owners", [(), (owner("batch/v1", "Job"),)], ids=["no owner", "an earlier job's"])
def test_what_a_job_of_this_kind_left_is_replaced(owners: tuple[dict[str, str], ...]) -> None:
    one = _Namespace(config(*owners))
    _put(cluster_of(ask=one.ask), config(), KINDS["job"])
    _hand_over(cluster_of(ask=one.ask), KINDS["job"], CONFIG, {"metadata": NAME})
    assert one.changes == ["put", "patch"]


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


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Any:
    def of(answer: _Answer, follow: bool = False) -> Iterator[str]:
        pod = {"metadata": {"name": "clip-0"}, "status": {"phase": "Running"}}
        monkeypatch.setattr(pod_logs, "pods_of", lambda *_: [pod])
        monkeypatch.setattr(pod_logs, "stream", lambda *_, **__: answer)
        core = SimpleNamespace(connect_get_namespaced_pod_exec=None)
        return pod_logs.rank_lines(cluster_of(core=core), KINDS["job"], "clip", 3, follow)

    return of


def test_a_rank_s_log_ends_with_its_command_or_its_pod(lines: Any) -> None:
    assert list(lines(_Answer(0))) == ["step 1", "step 2"]
    assert list(lines(_Answer(137), follow=True)) == ["step 1", "step 2"], "tail was killed with its pod"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (_Answer(1, "tail: no such file\n"), "rank 3's log cannot be read in pod clip-0: tail: no such file"),
        (_Answer(137), "rank 3's log cannot be read in pod clip-0: exit code 137"),
        (_Answer(WebSocketConnectionClosedException("lost")), "the connection to pod clip-0 ended: lost"),
        (_Answer(TypeError("no status")), "the connection to pod clip-0 ended: no status"),
    ],
    ids=["no file", "killed", "connection lost", "no status"],
)
def test_a_rank_s_log_that_cannot_be_read_is_told_in_a_sentence(
    lines: Any, answer: _Answer, said: str
) -> None:
    with pytest.raises(ClusterError, match=said):
        list(lines(answer))


def test_a_run_without_a_record_is_ended_by_a_command_for_its_cluster() -> None:
    details = {"context": "one b", "namespace": "ml", "kind": "job", "name": "mine", "uid": "1"}
    submission = Submission("kubernetes", "ml/mine", "2026-01-02T03:04:05+00:00", details)
    words = "kubectl '--context=one b' --namespace=ml delete job mine"
    assert KubernetesScheduler().ends(submission) == words


@pytest.mark.parametrize("blocked", ["artefacts", "artefacts/submission.env/a"], ids=["folder", "file"])
def test_an_object_that_kubectl_made_is_known_where_no_record_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    metadata = {**NAME, "labels": LABELS, "creationTimestamp": "2026-01-02T03:04:05Z"}
    found = SimpleNamespace(context="one", namespace="ml", read=lambda *_: {"metadata": metadata})
    monkeypatch.setattr("trainer.launch.kubernetes.cluster.connect", lambda *_: found)
    monkeypatch.chdir(tmp_path)
    where = tmp_path / "runs/clip" / blocked
    where.parent.mkdir(parents=True)
    where.touch()
    adopted = KubernetesScheduler().adopt(tiny_job(name="clip", kubernetes={}), None)
    assert adopted is not None
    assert (adopted[0], adopted[1].id) == (Path("runs/clip"), "ml/clip")
