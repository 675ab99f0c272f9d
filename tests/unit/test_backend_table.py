"""The table of backends: who starts and connects each, and what it is refused."""

from typing import Any, get_args

import pytest

from tests.support.check import found, problems
from tests.support.jobs import tiny_job
from trainer.comm.backends import check_restarts, meeting_variables, starts_again
from trainer.config import Job
from trainer.errors import InputError

BACKENDS = get_args(type(tiny_job().comm).model_fields["backend"].annotation)
LAUNCHERS: Any = ("clipship", "mpirun")


def restarting(**sections: Any) -> Job:
    """Returns a job that asks for restarts of its ranks."""
    return tiny_job(recovery={"max_restarts": 3}, **sections)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_every_backend_and_starts_ranks_again(name: str, launcher: Any) -> None:
    job = restarting(comm={"backend": name, "launcher": launcher})
    assert problems(job, "--no-data", "--nproc", "2") == ""
    (row,) = found(job, "--no-data", "--nproc", "2")["rows"]["backend"]
    assert row.startswith(name)
    assert f", ranks started by {launcher}" in row
    assert bool(meeting_variables(job, launcher)) == (name == "horovod" and launcher == "clipship")
    check_restarts(job, launcher)
    again = {"clipship": "", "mpirun": "always" if name == "horovod" else "lost"}
    assert starts_again(job, launcher) == again[launcher]
    assert starts_again(tiny_job(comm={"backend": name}), launcher) == ""


@pytest.mark.parametrize("place", ["slurm", "kubernetes"])
@pytest.mark.parametrize(
    ("nodes", "launcher", "told"), [(33, "clipship", 1), (32, "clipship", 0), (33, "auto", 0)]
)
def test_many_ranks_without_mpi_are_told(place: str, nodes: int, launcher: str, told: int) -> None:
    kubernetes = {"gpu_resource": "none", "mounts": {"/runs": "pvc:runs"}}
    sections: Any = {"slurm": {"gpus": "none"}} if place == "slurm" else {"kubernetes": kubernetes}
    comm = {"backend": "horovod", "launcher": launcher}
    job = tiny_job(
        comm=comm,
        resources={"nodes": nodes, "gpus_per_node": 1},
        optim={"global_batch_size": 32 * 33},
        data={"synthetic_samples": 10**5},
        image={"tag": "registry/clip:1"},
        logging={"runs": "/runs"},
        **sections,
    )
    said = "Gloo connects 33 ranks of comm.backend = horovod: it is slow beyond 32; MPI, "
    warnings = found(job, "--no-data")["warnings"]
    assert [said in warning for warning in warnings].count(True) == told


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


def test_restarts_of_ranks_that_read_standard_input_are_refused() -> None:
    data = {"format": "webdataset", "train": ("-",), "stream_samples": 8}
    assert "standard input can be read only once" in problems(restarting(data=data), "--no-data")
