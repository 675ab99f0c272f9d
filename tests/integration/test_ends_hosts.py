"""Ends of runs over several machines, each with its own network and name.

The machine that starts the ranks runs none of them, and still learns how they end.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import net_hosts
from tests.support.ends import CLIPSHIP, DEATH_S, Running, begin, full, starts
from tests.support.net_hosts import Third, three_machines

pytestmark = pytest.mark.skipif(net_hosts.missing() is not None, reason=f"needs {net_hosts.missing()}")
SEVERAL = "a run over several machines: rank killed, node cut off"
LOST_NODE = "node lost, the coordinator's too"
SILENCE_S = 8.0


@pytest.fixture
def third(tmp_path: Path) -> Iterator[Third]:
    with three_machines(tmp_path) as found:
        yield found


def start(tmp_path: Path, third: Third, backend: str, launcher: str, fault: str, **sections: Any) -> Running:
    around = [
        *third.around,
        "env",
        f"TMPDIR={third.own}",
        f"PATH={third.programs}:/usr/sbin:/usr/bin:/sbin:/bin",
    ]
    return begin(
        tmp_path,
        backend,
        launcher,
        fault,
        around=around,
        hosts="node-a:1,node-b:1",
        timeouts={"silence_s": SILENCE_S},
        **sections,
    )


@pytest.mark.fault(SEVERAL)
@starts(CLIPSHIP)
def test_rank_that_is_killed_on_another_machine_gives_the_runs_code_and_reason(
    tmp_path: Path, third: Third, backend: str, launcher: str
) -> None:
    running = start(tmp_path, third, backend, launcher, "kill:1:step:3")
    end = running.end()
    assert end.code == 1, end.errors
    assert "rank 1 on node-b ended the run with exit code 1: killed by SIGKILL in step, step 3" in end.errors
    assert [record["node"] for record in json.loads((end.folder / "environment.json").read_text())] == [
        "node-a",
        "node-b",
    ]


@pytest.mark.fault(SEVERAL)
@pytest.mark.fault(LOST_NODE)
@full
@pytest.mark.mpi
@pytest.mark.parametrize("victim", [0, 1])
def test_node_that_is_cut_off_ends_the_run_on_the_other_and_is_named(
    tmp_path: Path, third: Third, victim: int
) -> None:
    """As a power cut looks from outside: nothing closes a connection. Rank 0's node among them."""
    running = start(tmp_path, third, "torch", "mpirun", f"unplug:{victim}:step:3")
    end = running.end()
    name = ("node-a", "node-b")[victim]
    assert end.code == 1, end.errors
    assert (
        f"rank {victim} on {name} ended the run with exit code 1: its supervisor is gone: "
        f"it has been silent for {SILENCE_S:g} s"
    ) in end.errors
    word = json.loads((end.folder / "exit.json").read_text())
    assert word["node"] == name
    assert word["time"] - float(running.moment.read_text()) < DEATH_S


@pytest.mark.fault(SEVERAL, goes_on=True)
@full
def test_supervisor_of_another_machine_is_started_again_over_ssh(tmp_path: Path, third: Third) -> None:
    recovery = {"max_restarts": 3, "backoff_s": 0.0}
    end = start(tmp_path, third, "torch", "clipship", "orphan:1:step:3:1", recovery=recovery).end()
    assert end.code == 0, end.errors
    assert "clipship: rank 1's supervisor on node-b ended" in end.errors
    restarts = json.loads((end.folder / "result.json").read_text())["restarts"]
    assert [(each["kind"], each["node"], each["ranks"]) for each in restarts] == [("lost", "node-b", 2)]


@pytest.mark.fault(SEVERAL, goes_on=True)
@pytest.mark.fault(LOST_NODE, goes_on=True)
def test_run_goes_on_with_fewer_ranks_when_a_machine_is_cut_off(tmp_path: Path, third: Third) -> None:
    recovery = {"max_restarts": 3, "backoff_s": 0.0, "min_nodes": 1}
    end = start(tmp_path, third, "torch", "clipship", "unplug:1:step:3", recovery=recovery).end()
    assert end.code == 0, end.errors
    restarts = json.loads((end.folder / "result.json").read_text())["restarts"]
    assert [(each["kind"], each["node"], each["ranks"]) for each in restarts] == [("lost", "node-b", 1)]


@pytest.mark.mpi
@pytest.mark.horovod
def test_bridge_of_containers_is_not_taken_for_the_network(tmp_path: Path, third: Third) -> None:
    """Each machine has docker's bridge, with the same address: over it Open MPI would reach itself."""
    end = start(tmp_path, third, "horovod", "mpirun", "").end()
    assert end.code == 0, end.errors
