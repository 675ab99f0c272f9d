"""Faults in the allocation of a real Slurm, and the check that the same job goes on: the matrix of all doors.

A cell is a fault, the number of spare nodes and a backend; mpi is Horovod whose ranks MPI connects. There
are no spares then, and all supervisors start again.
"""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from tests.cluster.slurm.runs import Demo
from tests.support.processes import command_line

Fault = Literal["rank", "supervisor", "node", "drained"]
"""Fault of node n2: its rank is killed, or its supervisor, or slurmd and all that it started, or (`drained`)
its rank after Slurm was told to drain the node."""
TWO_NODES = {"gpus_per_node": 1}
RANK, SUPERVISOR = b"\0trainer.supervise.rank.rank_start\0", b"\0trainer.rank\0"
AROUND = (b"\0-c\0", b"\0trainer.launch.ranks.respawn\0", b"srun\0")
"""Words of a process that has another's whole command line among its own: a shell, what starts it again, and
srun."""
OVER_MPI = {"comm": {"backend": "horovod", "deterministic": False, "launcher": "mpirun"}}
COMM = {"torch": {}, "horovod": {"comm": {"backend": "horovod", "deterministic": False}}, "mpi": OVER_MPI}
SHORTENED, STEPS = {"epochs": 2, "warmup_steps": 10}, 44


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix."""

    backend: Literal["torch", "horovod", "mpi"]
    fault: Fault
    spares: int = 0

    def __str__(self) -> str:
        return f"{self.backend}-{self.fault}-{'spare' if self.spares else 'alone'}"

    @property
    def ranks(self) -> int:
        """Ranks after the fault: only the loss of a node without a spare leaves fewer, and not under MPI."""
        return 1 if self.backend != "mpi" and (self.fault, self.spares) == ("node", 0) else 2

    @property
    def starts(self) -> str:
        """Times that Slurm queues the job again: only where MPI has lost a node."""
        return "1" if (self.backend, self.fault) == ("mpi", "node") else "0"


CELLS = [
    *(
        Cell(backend, fault, spares)
        for backend in ("torch", "horovod")
        for fault in ("rank", "supervisor", "node", "drained")
        for spares in (0, 1)
    ),
    *(Cell("mpi", fault) for fault in ("rank", "supervisor", "node", "drained")),
]


def cells(*short: Cell) -> pytest.MarkDecorator:
    """Parametrizes a test with the whole matrix; cells that are not named here run only with `-m full`."""
    return pytest.mark.parametrize("cell", [_param(cell, cell in short) for cell in CELLS])


def _param(cell: Cell, is_short: bool) -> Any:
    marks = [*([] if cell.backend == "torch" else [pytest.mark.horovod])]
    return pytest.param(cell, id=str(cell), marks=[*marks, *([] if is_short else [pytest.mark.full])])


def check_goes_on(demo: Demo, cell: Cell, slurm: Mapping[str, object] | None = None) -> None:
    """Trains with the cell's fault after a few steps; `slurm` are more keys of [slurm]."""
    name = f"goes-on-{cell}"
    fewer = {"min_nodes": 1} if cell.ranks == 1 else {}
    job = demo.submit(
        name,
        resources=TWO_NODES,
        checkpoint={"every_steps": 5},
        optim=SHORTENED,
        recovery={"max_restarts": 3, "backoff_s": 0.0, "spare_nodes": cell.spares, **fewer},
        slurm=slurm or {},
        **COMM[cell.backend],
    )
    demo.wait_for_step(name, 7, job)
    harm(demo, cell.fault)
    demo.wait(name, job)
    if cell.fault == "drained":
        demo.cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    demo.completed(name, job, cell.starts)
    result = demo.result(name)
    assert (result["steps"], result["world_size"]) == (STEPS, cell.ranks)
    if cell.starts == "0":
        first = result["restarts"][0]
        # PMIx may end all in the moment in which one rank dies, before a supervisor can say which.
        unnamed = cell.backend == "mpi" and (first["kind"], first["node"]) == ("lost", "")
        assert first["node"] == "n2" or unnamed, first
        assert first["ranks"] == cell.ranks
        assert first["kind"] in _kinds(cell), first


def _kinds(cell: Cell) -> tuple[str, ...]:
    """Returns what the restart may be called: under MPI only the request to start again may be left."""
    if cell.backend == "mpi":
        return ("fault", "lost")
    return ("fault",) if cell.fault in ("rank", "drained") else ("lost",)


def harm(demo: Demo, fault: Fault) -> None:
    """Does it to node n2."""
    if fault == "node":
        demo.cluster.kill_node("n2")
        return
    if fault == "drained":
        demo.cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=a-test")
    os.kill(processes(demo, "n2", SUPERVISOR if fault == "supervisor" else RANK)[0], signal.SIGKILL)


def processes(demo: Demo, node: str, mark: bytes) -> list[int]:
    """Returns the processes of the node whose command line has the mark, the oldest first.

    The copy of a rank that forks later ones has it, too.
    """
    return sorted(
        pid
        for pid in demo.cluster.members(node)
        if mark in (line := command_line(pid)) and not any(word in line for word in AROUND)
    )
