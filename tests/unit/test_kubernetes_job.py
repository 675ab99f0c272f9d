"""Kinds of a job on Kubernetes: which one it gets, what an Indexed Job refuses, and what is queued."""

from typing import Any

import pytest

from tests.support.kubernetes_jobs import HOROVOD, TOPOLOGY, kubernetes_job, objects_of
from trainer.errors import InputError
from trainer.launch.kubernetes.manifest import manifest


def rendered(kind: str | None = "job", keys: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """Returns the rendered objects by kind; `keys` are further ones of [kubernetes]."""
    job = kubernetes_job(kubernetes={"kind": kind, **(keys or {})}, **sections)
    return {item["kind"]: item for item in objects_of(manifest(job))}


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
