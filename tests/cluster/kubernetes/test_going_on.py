"""Real MPIJobs with `recovery.max_restarts`: a pod is lost, or asked to go, and the job goes on."""

from collections.abc import Callable

import pytest

from tests.cluster.kubernetes.runs import STOP_ALL, Demo
from tests.cluster.kubernetes.test_runs import BACKENDS, NO_CHECKPOINT, PATIENT, RECOVERY, THREE_EPOCHS
from trainer.errors import EXIT_DONE

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(1800)]
full = pytest.mark.full

FAULT_AT = 12
"""By then each rank has copied its state in memory for ten steps."""


class Job:
    """A job without checkpoints but those of its end and of requests to stop; each step is in memory."""

    def __init__(self, demo: Demo, name: str, backend: str, **env: str) -> None:
        self.demo, self.name = demo, name
        self.mpijob = demo.submit(
            name,
            comm=BACKENDS[backend],
            optim=THREE_EPOCHS,
            checkpoint=NO_CHECKPOINT,
            recovery=RECOVERY,
            env={**PATIENT, **env},
        )
        demo.wait_for_step(name, FAULT_AT)

    def pods(self, role: str) -> dict[str, str]:
        """Returns the names of the pods of `launcher`, `worker-0` or `worker-1`, by their uids."""
        kind, _, number = role.partition("-")
        pods = [pod["metadata"] for pod in self.demo.pods(self.mpijob, kind)]
        return {pod["uid"]: pod["name"] for pod in pods if not number or pod["name"].endswith(f"-{number}")}

    def lose(self, role: str, how: Callable[[str], None]) -> None:
        """Waits for the pod's successor: later the end of the job takes all workers away."""
        before = self.pods(role)
        [name] = before.values()
        how(name)
        self.demo.until(
            lambda: bool(self.pods(role).keys() - before.keys()),
            lambda: f"{name} has no successor:\n{self.demo.said(self.name)}",
        )

    def stop_and_delete(self, name: str) -> None:
        """Deletes a worker that can save nothing any more, as a node's failure does."""
        self.demo.inside(name, STOP_ALL)
        self.demo.delete_pod(name, grace_period_seconds=0)

    def kill_and_delete(self, name: str) -> None:
        """Deletes a pod whose first process is dead, too, which only root of the pod's node can kill."""
        self.demo.kill_pod(name)
        self.demo.delete_pod(name, grace_period_seconds=0)

    def ended_well(self) -> None:
        """Waits for the end of the MPIJob."""
        self.demo.lost_no_step(self.name)
        assert self.demo.exit(self.name)["exit_code"] == EXIT_DONE


once_for_torch = pytest.mark.parametrize("backend", ["torch", pytest.param("horovod", marks=full)])


@pytest.mark.parametrize(
    ("backend", "worker"),
    [
        ("torch", 1),
        pytest.param("torch", 0, marks=full),
        pytest.param("horovod", 1, marks=full),
        pytest.param("horovod", 0, marks=full),
    ],
)
def test_a_worker_that_vanishes_is_a_restart_of_the_same_start_from_the_others_memory(
    demo: Demo, backend: str, worker: int
) -> None:
    job = Job(demo, f"vanishes-{backend}-{worker}", backend)
    launcher = job.pods("launcher")
    job.lose(f"worker-{worker}", job.stop_and_delete)
    job.ended_well()
    assert demo.memory(job.name)["starts"] == 1, demo.said(job.name)
    [restart] = demo.result(job.name)["restarts"]
    assert restart["generation"] == 2
    assert restart["kind"] == "lost"
    assert restart["rank"] == worker
    assert restart["node"] == f"{job.mpijob}-worker-{worker}"
    assert restart["from_step"] >= FAULT_AT - 1  # no checkpoint has it
    assert f"from the memory of {job.mpijob}-worker-{1 - worker}" in demo.said(job.name)
    assert job.pods("launcher") == launcher


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ("evicted", "torch"),
        pytest.param("evicted", "horovod", marks=full),
        pytest.param("deleted", "torch", marks=full),
        pytest.param("deleted", "horovod", marks=full),
    ],
)
def test_a_worker_that_is_evicted_or_deleted_saves_first_and_that_is_no_fault(
    demo: Demo, how: str, backend: str
) -> None:
    job = Job(demo, f"{how}-{backend}", backend)
    launcher = job.pods("launcher")
    job.lose("worker-1", demo.evict_pod if how == "evicted" else demo.delete_pod)
    job.ended_well()
    assert demo.result(job.name)["restarts"] == []
    assert demo.memory(job.name)["failures"] == 0
    said = demo.said(job.name)
    assert "is saved, and the run can go on" in said
    assert "the ranks are started again (a worker was asked to stop)" in said
    assert job.pods("launcher") == launcher


@once_for_torch
def test_a_deleted_launcher_saves_first_and_its_successor_goes_on(demo: Demo, backend: str) -> None:
    job = Job(demo, f"led-{backend}", backend)
    job.lose("launcher", demo.delete_pod)
    job.ended_well()
    assert demo.memory(job.name)["starts"] == 2
    assert demo.memory(job.name)["failures"] == 0


@once_for_torch
def test_after_a_launcher_that_vanishes_its_successor_goes_on_from_memory(demo: Demo, backend: str) -> None:
    """Open MPI's daemons end the ranks, and leave them here no second in which to save."""
    job = Job(demo, f"unled-{backend}", backend, OMPI_MCA_odls_base_sigkill_timeout="0")
    job.lose("launcher", job.kill_and_delete)
    job.ended_well()
    assert "from the memory of" in demo.said(job.name)
    assert demo.memory(job.name)["starts"] == 2
    assert demo.memory(job.name)["failures"] == 0
