"""Runs over several machines, each with its own network and name: how they end, and how they go on.

The machine that starts the ranks runs none of them, and still learns how they end. A spare machine takes a
lost one's place, fewer ranks go on, and a network that was cut is healed again.
"""

import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.test_ends_recovery import weights
from tests.support import net_hosts
from tests.support.ends import CLIPSHIP, DEATH_S, HOROVOD, Running, begin, full, losses, restarts, starts
from tests.support.net_hosts import THREE, TWO, Third, three_machines

pytestmark = pytest.mark.skipif(net_hosts.missing() is not None, reason=f"needs {net_hosts.missing()}")
SEVERAL = "a run over several machines: rank killed, node cut off"
LOST_NODE = "node lost, the coordinator's too"
SILENCE_S = 8.0
STEPS = 6
RECOVERY = {"max_restarts": 5, "backoff_s": 0.0}


@pytest.fixture
def machines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Third]:
    """Machines of the names that the test is parametrized with, indirectly."""
    with three_machines(tmp_path, getattr(request, "param", TWO)) as found:
        yield found


def start(
    folder: Path,
    machines: Third,
    start_of: tuple[str, str],
    fault: str = "",
    names: Sequence[str] = TWO,
    **sections: Any,
) -> Running:
    """Starts one rank on each machine; with `recovery.spare_nodes` the last ones are spares."""
    folder.mkdir(exist_ok=True)
    around = [
        *machines.around,
        "env",
        f"TMPDIR={machines.own}",
        f"PATH={machines.programs}:/usr/sbin:/usr/bin:/sbin:/bin",
    ]
    hosts = ",".join(f"{name}:1" for name in names)
    timeouts = {"silence_s": SILENCE_S}
    return begin(folder, *start_of, fault, around=around, hosts=hosts, timeouts=timeouts, **sections)


def start_again(*where: Any, recovery: dict[str, Any], **sections: Any) -> Running:
    """Starts them as `start` does, in float64; they may start again."""
    return start(*where, recovery={**RECOVERY, **recovery}, model={"precision": "fp64"}, **sections)


def whole_run(folder: Path, start_of: tuple[str, str], steps: int = STEPS) -> Path:
    """Run folder of the same training without a fault, on two ranks of this machine."""
    folder.mkdir()
    return begin(folder, *start_of, steps=steps, model={"precision": "fp64"}).end().folder


def furthest(one: Path, other: Path, step: int = STEPS) -> float:
    """Largest relative difference of any tensor of the weights, as norms in float64; 0: each bit is equal."""
    ours, theirs = weights(one, step), weights(other, step)
    assert ours.keys() == theirs.keys()
    if all(torch.equal(ours[name], theirs[name]) for name in ours):
        return 0.0
    pairs = [(ours[name].double(), theirs[name].double()) for name in ours]
    return max(float((a - b).norm() / max(float(b.norm()), 1e-12)) for a, b in pairs)


@pytest.mark.fault(SEVERAL)
@starts(CLIPSHIP)
def test_rank_that_is_killed_on_another_machine_gives_the_runs_code_and_reason(
    tmp_path: Path, machines: Third, backend: str, launcher: str
) -> None:
    end = start(tmp_path, machines, (backend, launcher), "kill:1:step:3").end(1)
    assert "rank 1 on node-b ended the run with exit code 1: killed by SIGKILL in step, step 3" in end.errors
    environment = json.loads((end.folder / "environment.json").read_text())
    assert [record["node"] for record in environment] == ["node-a", "node-b"]


@pytest.mark.fault(SEVERAL)
@pytest.mark.fault(LOST_NODE)
@full
@pytest.mark.mpi
@pytest.mark.parametrize("victim", [0, 1])
def test_node_that_is_cut_off_ends_the_run_on_the_other_and_is_named(
    tmp_path: Path, machines: Third, victim: int
) -> None:
    """As a power cut looks from outside: nothing closes a connection. Rank 0's node among them."""
    running = start(tmp_path, machines, ("torch", "mpirun"), f"unplug:{victim}:step:3")
    end = running.end(1)
    name = ("node-a", "node-b")[victim]
    assert (
        f"rank {victim} on {name} ended the run with exit code 1: its supervisor is gone: "
        f"it has been silent for {SILENCE_S:g} s"
    ) in end.errors
    word = json.loads((end.folder / "exit.json").read_text())
    assert word["node"] == name
    assert word["time"] - float(running.moment.read_text()) < DEATH_S


@pytest.mark.fault(SEVERAL, goes_on=True)
@full
def test_supervisor_of_another_machine_is_started_again_over_ssh(tmp_path: Path, machines: Third) -> None:
    end = start(tmp_path, machines, ("torch", "clipship"), "orphan:1:step:3:1", recovery=RECOVERY).end()
    assert "clipship: rank 1's supervisor on node-b ended" in end.errors
    (restart,) = restarts(end.folder)
    assert (restart["kind"], restart["node"], restart["ranks"]) == ("lost", "node-b", 2)


@pytest.mark.fault(SEVERAL, goes_on=True)
@pytest.mark.fault(LOST_NODE, goes_on=True)
def test_run_goes_on_with_fewer_ranks_when_a_machine_is_cut_off(tmp_path: Path, machines: Third) -> None:
    recovery = {**RECOVERY, "min_nodes": 1}
    end = start(tmp_path, machines, ("torch", "clipship"), "unplug:1:step:3", recovery=recovery).end()
    (restart,) = restarts(end.folder)
    assert (restart["kind"], restart["node"], restart["ranks"]) == ("lost", "node-b", 1)


@pytest.mark.mpi
@pytest.mark.horovod
def test_bridge_of_containers_is_not_taken_for_the_network(tmp_path: Path, machines: Third) -> None:
    """Each machine has docker's bridge, with the same address: over it Open MPI would reach itself."""
    start(tmp_path, machines, ("horovod", "mpirun"), "").end()


both = pytest.mark.parametrize(
    "start_of", [pytest.param(start.values, id=start.id, marks=start.marks) for start in (CLIPSHIP, HOROVOD)]
)


@full
@both
@pytest.mark.fault(LOST_NODE, goes_on=True)
@pytest.mark.parametrize("machines", [THREE], indirect=True, ids=["three"])
@pytest.mark.parametrize("victim", [0, 1])
def test_spare_machine_takes_the_place_of_a_lost_one_and_changes_no_bit(
    tmp_path: Path, machines: Third, start_of: tuple[str, str], victim: int
) -> None:
    whole = start_again(tmp_path / "whole", machines, start_of, recovery={}).end().folder
    fault, recovery = f"unplug:{victim}:step:3:1", {"spare_nodes": 1}
    end = start_again(tmp_path / "run", machines, start_of, fault, THREE, recovery=recovery).end()
    (restart,) = restarts(end.folder)
    assert (restart["kind"], restart["node"], restart["ranks"]) == ("lost", THREE[victim], 2)
    environment = json.loads((end.folder / "environment.json").read_text())
    assert {rank["node"] for rank in environment} == {name for name in THREE if name != THREE[victim]}
    assert losses(end.folder) == losses(whole)
    assert furthest(end.folder, whole) == 0.0


@full
@both
@pytest.mark.fault(SEVERAL, goes_on=True)
def test_spare_machine_goes_on_at_the_checkpoint_where_only_a_machine_without_a_rank_has_a_newer_step(
    tmp_path: Path, machines: Third, start_of: tuple[str, str]
) -> None:
    """Its machine is left out after the second fault, so it has no rank that could send the step."""
    whole = start_again(tmp_path / "whole", machines, start_of, names=TWO[:1], recovery={}).end()
    # The lag gives the checkpoint time to reach the disk.
    faults = "kill:0:step:3:1,lag:0:step:4:2,kill:0:step:5:2"
    keys: dict[str, Any] = {"recovery": {"spare_nodes": 1}, "checkpoint": {"every_steps": 3}}
    end = start_again(tmp_path / "run", machines, start_of, faults, **keys).end()
    found = [(each["from_step"], each["node"]) for each in restarts(end.folder)]
    assert found == [(2, "node-a"), (3, "node-a")]
    told = (
        "step 4 is only in the memory of node-a, which has no rank now: the newest checkpoint, step 3, serves"
    )
    assert told in end.output + end.errors
    assert losses(end.folder) == losses(whole.folder)
    assert furthest(end.folder, whole.folder) == 0.0


@full
@both
@pytest.mark.fault(LOST_NODE, goes_on=True)
def test_fewer_ranks_go_on_with_the_same_batches_to_the_same_weights(
    tmp_path: Path, machines: Third, start_of: tuple[str, str]
) -> None:
    whole = whole_run(tmp_path / "whole", start_of)
    fault, recovery = "unplug:1:step:3:1", {"min_nodes": 1}
    end = start_again(tmp_path / "run", machines, start_of, fault, recovery=recovery).end()
    (restart,) = restarts(end.folder)
    assert (restart["kind"], restart["node"], restart["ranks"]) == ("lost", "node-b", 1)
    assert losses(end.folder) == pytest.approx(losses(whole), rel=1e-6)
    assert furthest(end.folder, whole) < 1e-6


@full
@both
@pytest.mark.fault("node frozen or cut off, rank 0's too", goes_on=True)
def test_one_side_of_a_cut_network_goes_on_and_takes_the_other_back_when_it_is_healed(
    tmp_path: Path, machines: Third, start_of: tuple[str, str]
) -> None:
    steps = 150
    whole = whole_run(tmp_path / "whole", start_of, steps)
    running = start_again(
        tmp_path / "run",
        machines,
        start_of,
        "lag:0:step:5",  # until the end, so that the run lasts long enough
        recovery={"min_nodes": 1},
        steps=steps,
        checkpoint={"every_steps": 50},
    )
    try:
        running.reached(5)
        machines.cut(*TWO)
        kinds(running, ["lost"])
        machines.heal(*TWO)
        kinds(running, ["lost", "taken in"])
        end = running.end()
    finally:
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(60)
    assert [(each["kind"], each["ranks"]) for each in restarts(end.folder)] == [("lost", 1), ("taken in", 2)]
    claims = [json.loads(path.read_text()) for path in (end.folder / "generations").iterdir()]
    assert len({claim["member"] for claim in claims}) == 1, "one side alone has started generations"
    assert losses(end.folder) == pytest.approx(losses(whole), rel=1e-6)
    assert furthest(end.folder, whole, steps) < 1e-6


def kinds(running: Running, wanted: Sequence[str]) -> None:
    """Returns once these restarts were made, in this order."""
    path = running.folder / "restarts.json"
    running.until(
        lambda: path.exists() and [each["kind"] for each in restarts(running.folder, path.name)] == wanted
    )
