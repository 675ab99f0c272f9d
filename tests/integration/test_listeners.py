"""On one machine, no socket of a run listens where another machine reaches it.

No part of a run unpickles what a stranger sends.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.listeners import Listener, listeners, outer_address, plant
from tests.support.processes import until
from tests.support.runs import LIMIT_S, TinyRun, kill_tree, tiny_run

LONG = 1_000_000
KEPT_ALIVE_S = 12.0
"""torch's agent reads the rendezvous' state every 5 s."""
STARTED_BY_MPI = ("prterun", "mpirun", "orted", "prted")
"""Open MPI's own daemon listens on every interface, whatever it is told."""

TELLS_KEYS = hasattr(TCPStore, "list_keys")


@contextmanager
def training(folder: Path, backend: str, launcher: str) -> Iterator[tuple[TinyRun, int]]:
    """A run of two ranks with loader processes in the middle of its steps, and its process number.

    The run is killed afterwards.
    """
    run = tiny_run(
        folder,
        data={"workers": 1, "synthetic_samples": 1024},
        optim={"steps": LONG},
        comm={"backend": backend, "launcher": launcher},
        timeouts={"init_s": LIMIT_S},
    )
    with open(folder / "errors", "w") as errors:
        process = subprocess.Popen(run.command(2), cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)
    try:
        until(lambda: run.last_step() >= 2, process, otherwise=(folder / "errors").read_text)
        yield run, process.pid
    finally:
        kill_tree(process.pid)
        process.wait()


def of_ranks(found: list[Listener]) -> list[Listener]:
    return [listener for listener in found if "trainer.supervise.rank.rank_start" in listener.command]


@pytest.mark.parametrize(
    ("backend", "launcher"),
    [
        pytest.param("torch", "auto"),
        pytest.param("horovod", "auto", marks=pytest.mark.horovod),
        pytest.param("torch", "mpirun", marks=[pytest.mark.mpi, pytest.mark.full]),
        pytest.param("horovod", "mpirun", marks=[pytest.mark.mpi, pytest.mark.horovod, pytest.mark.full]),
    ],
)
def test_no_process_of_a_local_run_listens_to_other_machines_or_runs_a_planted_pickle(
    tmp_path: Path, backend: str, launcher: str
) -> None:
    mark = tmp_path / "ran"
    with training(tmp_path, backend, launcher) as (run, pid):
        everyone = listeners(pid)
        if (backend, launcher) == ("torch", "auto") and TELLS_KEYS:
            plant(everyone, outer_address(), mark)
            time.sleep(KEPT_ALIVE_S)
            before = run.last_step()
            until(lambda: run.last_step() > before, otherwise=lambda: "the run goes on")
    assert not mark.exists()
    of_mpi = [each for each in everyone if each.command.partition(" ")[0].endswith(STARTED_BY_MPI)]
    found = [listener for listener in everyone if listener not in of_mpi]
    assert len(of_ranks(found)) >= 2 or backend == "horovod", (
        found
    )  # Gloo under Horovod listens only until its ranks have met
    assert any("trainer.rank" in listener.command for listener in found), found
    assert [listener for listener in found if not listener.is_local] == []


@pytest.mark.skipif(not TELLS_KEYS, reason="this torch's store does not tell its keys")
def test_the_planted_pickle_would_run_in_torchruns_standalone_mode(tmp_path: Path) -> None:
    """Shows that the test before this one can fail."""
    mark = tmp_path / "ran"
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node=1", "--no-python", "sleep", "600"]
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        until(lambda: plant(listeners(process.pid), outer_address(), mark), every_s=0.5)
        until(mark.exists, process)
    finally:
        kill_tree(process.pid)
        process.wait()
