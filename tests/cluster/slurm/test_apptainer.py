"""Ranks in containers of a real apptainer, on Debian's sid: `tests/cluster/slurm/newer.sh sid`, for no
release carries the package.

The image is sid's own root file system as a sandbox, with this machine's Python mounted into it.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.cluster.slurm.cluster import REPOSITORY
from tests.cluster.slurm.going_on import Cell, cells, check_goes_on
from tests.cluster.slurm.runs import HOSTILE, SHORT, Demo

pytestmark = [pytest.mark.apptainer, pytest.mark.timeout(3600)]

OF_THE_SYSTEM = {"usr", "bin", "sbin", "lib", "lib64", "etc", "var"}


@pytest.fixture(scope="module")
def container() -> dict[str, object]:
    """Keys of [slurm]."""
    image = Path(os.environ["CLIPSHIP_SANDBOX"])
    (image / "workspace").mkdir(exist_ok=True)  # where the product's images have their working directory
    homes = {Path(folder).parts[1] for folder in (sys.prefix, sys.base_prefix, REPOSITORY)} - OF_THE_SYSTEM
    return {
        "container": "apptainer",
        "image": str(image),
        "mounts": [f"/{home}:/{home}" for home in sorted(homes)],
    }


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_variables_arrive_in_the_container_as_they_are_written(
    demo: Demo, container: dict[str, object], launcher: str
) -> None:
    found = demo.variables(
        f"variables-{launcher}",
        env=HOSTILE,
        slurm={**container, "launcher": launcher, "python": demo.stand_in()},
    )
    for variables in found:
        assert variables["APPTAINER_CONTAINER"]
        assert {key: variables[key] for key in HOSTILE} == HOSTILE
        assert (variables["CLIPSHIP_WORLD_SIZE"], variables["OMP_NUM_THREADS"]) == ("4", "1")
    assert len({variables["CLIPSHIP_TOKEN"] for variables in found}) == 1


@pytest.mark.parametrize(
    ("backend", "launcher"),
    [("torch", "srun"), pytest.param("horovod", "mpirun", marks=pytest.mark.horovod)],
    ids=["torch", "horovod"],
)
def test_ranks_in_containers_train_over_two_nodes(
    demo: Demo, container: dict[str, object], backend: str, launcher: str
) -> None:
    comm = {"backend": backend, "deterministic": backend == "torch"}
    job = demo.submit(backend, comm=comm, slurm={**container, "launcher": launcher}, optim=SHORT)
    demo.completed(backend, job)
    assert demo.result(backend)["world_size"] == 4


@cells(Cell("torch", "node", spares=1))
def test_training_goes_on_in_the_same_job(demo: Demo, container: dict[str, object], cell: Cell) -> None:
    launcher = "mpirun" if cell.backend == "mpi" else "srun"
    check_goes_on(demo, cell, container | {"launcher": launcher})
