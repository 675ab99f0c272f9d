"""The table of backends: who starts and connects each, and what it is refused."""

from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.comm.backends import (
    BACKENDS,
    Launcher,
    check_lost_nodes,
    check_restarts,
    launcher_for,
    launcher_of,
    meeting_variables,
    over_mpi,
    row_of,
    starts_again,
)
from trainer.comm.connect import IMPLEMENTATIONS
from trainer.config import Job
from trainer.config.comm import Backend
from trainer.errors import InputError
from trainer.launch.kubernetes.validate import warnings as kubernetes_warnings
from trainer.launch.slurm.validate import warnings as slurm_warnings
from trainer.plan.check import check_without_files

LAUNCHERS: tuple[Launcher, ...] = ("clipship", "mpirun")


def test_every_backend_of_the_job_file_has_a_row() -> None:
    assert set(BACKENDS) == set(IMPLEMENTATIONS) == set(Backend.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", BACKENDS)
def test_every_launcher_can_start_every_backend(name: str) -> None:
    job = tiny_job(comm={"backend": name})
    assert row_of(job).name == name
    for launcher in LAUNCHERS:
        chosen = tiny_job(comm={"backend": name, "launcher": launcher})
        assert launcher_for(chosen, several_hosts=False) == launcher
        assert bool(meeting_variables(chosen, launcher)) == (name == "horovod" and launcher == "clipship")


def test_many_ranks_without_mpi_are_told() -> None:
    comm = {"backend": "horovod", "launcher": "clipship"}
    (said,) = slurm_warnings(tiny_job(comm=comm, resources={"nodes": 33}))
    assert said.startswith("Gloo connects 33 ranks of comm.backend = horovod: it is slow beyond 32; MPI, ")
    assert list(slurm_warnings(tiny_job(comm=comm, resources={"nodes": 32}))) == []
    assert list(slurm_warnings(tiny_job(comm={"backend": "horovod"}, resources={"nodes": 33}))) == []
    (kubernetes,) = (
        line
        for line in kubernetes_warnings(tiny_job(comm=comm, resources={"nodes": 33}))
        if line.startswith("Gloo")
    )
    assert kubernetes == said


def test_a_rank_knows_whether_mpi_connects_it() -> None:
    assert launcher_of({"CLIPSHIP_MEETS": "1", "HOROVOD_CONTROLLER": "mpi"}) == "clipship"
    assert launcher_of({"HOROVOD_CONTROLLER": "gloo"}) == "mpirun", "a variable of the user's shell"


def restarting(*, comm: dict[str, Any] | None = None, data: dict[str, Any] | None = None) -> Job:
    """Returns a job that asks for restarts of its ranks."""
    return tiny_job(recovery={"max_restarts": 3}, comm=comm or {}, data=data or {})


@pytest.mark.parametrize("name", BACKENDS)
def test_restarts_are_accepted_under_every_launcher_of_ours(name: str) -> None:
    for launcher in LAUNCHERS:
        job = restarting(comm={"backend": name, "launcher": launcher})
        check_restarts(job, launcher)
        check_without_files(job, 2)
        expected = "" if launcher != "mpirun" else "always" if over_mpi(job, launcher) else "lost"
        assert starts_again(job, launcher) == expected
        assert starts_again(tiny_job(comm={"backend": name}), launcher) == ""


def test_ranks_over_mpi_need_somebody_who_starts_all_again() -> None:
    """As where mpirun was called by hand."""
    with pytest.raises(InputError) as refused:
        check_restarts(restarting(comm={"backend": "horovod"}), "mpirun", starts_again=False)
    assert str(refused.value) == (
        "recovery.max_restarts = 3 needs ranks that can be started again, but MPI, which connects those of "
        "comm.backend = horovod, ends the whole run when one of its ranks is gone, and nothing is there to "
        "start all again: set it to 0, use `clipship run`, or comm.backend = torch"
    )
    check_restarts(restarting(comm={"backend": "torch"}), "mpirun", starts_again=False)


@pytest.mark.parametrize("key", ["spare_nodes", "min_nodes"])
def test_nodes_that_may_be_lost_are_refused_over_mpi(key: str) -> None:
    recovery = {"max_restarts": 3, key: 1}
    job = tiny_job(recovery=recovery, comm={"launcher": "mpirun"})
    with pytest.raises(InputError, match=f"recovery.{key} = 1 is of no use for ranks that .* over MPI"):
        check_without_files(job, 2)
    check_without_files(tiny_job(recovery=recovery), 2)
    check_lost_nodes(tiny_job(recovery=recovery), "clipship", keeps_going=True)


def test_restarts_of_ranks_that_read_standard_input_are_refused() -> None:
    data = {"format": "webdataset", "train": ("-",), "stream_samples": 8}
    with pytest.raises(InputError, match="standard input can be read only once"):
        check_restarts(restarting(data=data), "clipship")
