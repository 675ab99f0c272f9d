"""Kinds of a job on Kubernetes: which one it gets, what an Indexed Job refuses, and what is queued."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.kubernetes_jobs import HOROVOD, TOPOLOGY, kubernetes_job, objects_of
from trainer.cli.main import main
from trainer.config.loader import dump_job
from trainer.errors import InputError
from trainer.launch.kubernetes.manifest import manifest

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


def rendered(kind: str | None = "job", keys: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """Returns the rendered objects by kind; `keys` are further ones of [kubernetes]."""
    job = kubernetes_job(kubernetes={"kind": kind, **(keys or {})}, **sections)
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
    assert kind in rendered(None, comm=comm)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"comm": {**HOROVOD, "horovod": {"cpu_operations": "mpi"}}},
            "comm.horovod.cpu_operations = mpi cannot be with Jobs, where each pod starts its own",
        ),
        ({"comm": {"launcher": "mpirun"}}, "each pod starts its own; use auto or clipship"),
        ({"keys": {"launcher_start": "at-once"}}, "kubernetes.launcher_start: Jobs have no use for it"),
        (
            {"keys": {"patch": {"launcher": {"spec": {"nodeName": "a"}}}}},
            'patch.launcher: Jobs have no use for it: leave it out, or set kubernetes.kind = "mpijob"',
        ),
        ({"keys": {**TOPOLOGY, "pack_by": "kubernetes.io/hostname"}}, "leave these out, or topology"),
        ({"keys": {**TOPOLOGY, "spread_by": "kubernetes.io/hostname"}}, "leave these out, or topology"),
    ],
)
def test_what_an_indexed_job_cannot_do_is_refused_with_the_fix(
    sections: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InputError) as refused:
        rendered(**sections)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_check_says_how_many_pods_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = kubernetes_job(kubernetes={"kind": "job"}, recovery={"max_restarts": 1, "spare_nodes": 2})
    (tmp_path / "job.toml").write_text(dump_job(job))
    assert main(["check", str(tmp_path / "job.toml"), "--no-data"]) == 0
    assert "Job first-run, 4 pods, started by Kubernetes\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "workload"), [("mpijob", "MPIJob"), ("job", "Job"), ("trainjob", "TrainJob")]
)
def test_what_kueue_admits_is_queued_alone(kind: str, workload: str) -> None:
    objects = rendered(kind, {"queue": "gpus"})
    queued = [name for name, each in objects.items() if QUEUE_LABEL in each["metadata"].get("labels", {})]
    assert queued == [workload]
    assert len(objects) > 2
