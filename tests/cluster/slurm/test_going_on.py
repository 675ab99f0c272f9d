"""A job that goes on in its allocation without a supervisor or a node, on a real Slurm.

The first tests look at Slurm and the batch script alone: in place of supervisors, programs run that write
down when they start, and leave when the run folder has an end.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tests.cluster.slurm.going_on import (
    OVER_MPI,
    RANK,
    SHORTENED,
    STEPS,
    SUPERVISOR,
    TWO_NODES,
    Cell,
    cells,
    check_goes_on,
    processes,
)
from tests.cluster.slurm.runs import Demo
from trainer.run.exit_files import ExitFiles

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]
_SUPERVISOR = """\
#!/bin/sh
[ "$3" = trainer.rank ] || exec {python} "$@" # what starts it again is the real one
run=$(dirname "$(dirname "$4")")
trap 'echo "$SLURMD_NODENAME" >>"$run/asked"' USR2
echo "$SLURM_PROCID $SLURMD_NODENAME ${{CLIPSHIP_RESPAWNED:-0}} $$ $CLIPSHIP_TOKEN" >>"$run/started"
until [ -s "$run/exit.json" ]; do sleep 0.2; done
exit "$(sed -n 's/^exit_code=//p' "$run/artefacts/launcher.env")"
"""


class StandIns:
    """Job whose supervisors only write down when they start."""

    def __init__(self, demo: Demo, name: str, **recovery: int) -> None:
        python = demo.folder / "supervisor"
        python.write_text(_SUPERVISOR.format(python=sys.executable))
        python.chmod(0o755)
        self.demo, self.name = demo, name
        self.job = demo.submit(
            name, resources=TWO_NODES, slurm={"python": str(python)}, recovery={"max_restarts": 3, **recovery}
        )

    def started(self) -> list[list[str]]:
        """Returns number, node, 1 if it came again, process and token of each supervisor, in time's order."""
        path = self.demo.run(self.name) / "started"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def until_started(self, count: int) -> None:
        self.demo.until(lambda: len(self.started()) >= count, f"{count} do not start", self.name, self.job)

    def end(self, code: int, left_out: tuple[str, ...] = ()) -> None:
        """Ends the run, as rank 0's supervisor does."""
        record = {"rank": 0, "node": "n1", "exit_code": code, "reason": "the test's", "left_out": left_out}
        files = ExitFiles(str(self.demo.run(self.name)))
        asyncio.run(files.write("exit.json", record))

    def state(self) -> Mapping[str, str]:
        return self.demo.cluster.job(self.job)

    def until_node(self, node: str, state: str) -> None:
        def there() -> bool:
            shown = self.demo.cluster.run("scontrol", "--oneliner", "show", "node", node).stdout
            return state in shown

        self.demo.until(there, f"{node} does not become {state}", self.name, self.job)


def test_a_job_outlives_a_supervisor_a_lost_node_and_a_drained_one(demo: Demo) -> None:
    run = StandIns(demo, "outlives", spare_nodes=1)
    run.until_started(3)
    assert sorted(line[:3] for line in run.started()) == [
        ["0", "n1", "0"],
        ["1", "n2", "0"],
        ["2", "n3", "0"],
    ]
    victim = next(int(line[3]) for line in run.started() if line[1] == "n2")
    os.kill(victim, signal.SIGKILL)
    run.until_started(4)
    assert run.started()[3][:3] == ["1", "n2", "1"]
    demo.cluster.kill_node("n3")
    run.until_node("n3", "State=DOWN")
    demo.cluster.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=a-test")
    run.until_node("n2", "DRAIN")
    assert run.state()["JobState"] == "RUNNING", demo.output(run.name, run.job)
    assert run.state()["Restarts"] == "0"
    run.end(0)
    ended = demo.wait(run.name, run.job)
    demo.cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert ended["JobState"] == "COMPLETED", demo.output(run.name, run.job)
    assert len(run.started()) == 4
    assert len({line[4] for line in run.started()}) == 1  # one start, one token


def test_nodes_that_the_run_has_left_out_are_not_in_the_next_start(demo: Demo) -> None:
    run = StandIns(demo, "excluded")
    run.until_started(2)
    assert {line[1] for line in run.started()} == {"n1", "n2"}
    run.end(75, left_out=("n2",))
    run.until_started(4)
    assert {line[1] for line in run.started()[2:]} == {"n1", "n3"}, demo.output(run.name, run.job)
    run.end(0)
    assert demo.wait(run.name, run.job)["JobState"] == "COMPLETED"
    assert "the next start does without node n2" in demo.output(run.name, run.job)


def test_a_job_that_loses_its_first_node_is_queued_again(demo: Demo) -> None:
    """The batch script runs there, and Slurm would leave the rest of the job as it is.

    The ranks of the other nodes may have gone on, so they are asked to save before.
    """
    run = StandIns(demo, "first-node")
    run.until_started(2)
    demo.cluster.kill_node("n1")
    asked = demo.run(run.name) / "asked"
    demo.until(asked.exists, "nobody is asked to save", run.name, run.job)
    # Slurm signals the task and its child here, and the task passes it on: a supervisor takes both for one.
    assert set(asked.read_text().splitlines()) == {"n2"}
    assert run.state()["Restarts"] == "0"
    run.end(75)
    run.until_started(4)
    assert {line[1] for line in run.started()[2:]} == {"n2", "n3"}, demo.output(run.name, run.job)
    run.end(0)
    ended = demo.wait(run.name, run.job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")


# Of each two of fault, spare and backend most pairs are here; the tests above have those of Slurm's own part.
@cells(Cell("torch", "node", spares=1), Cell("horovod", "node"), Cell("mpi", "drained"))
def test_training_goes_on_in_the_same_job(demo: Demo, cell: Cell) -> None:
    check_goes_on(demo, cell)


@pytest.mark.full
def test_training_without_its_first_node_saves_on_the_others_before_it_is_queued_again(demo: Demo) -> None:
    name = "first-node-lost"
    job = demo.submit(
        name,
        resources=TWO_NODES,
        checkpoint={"every_steps": 10_000},
        optim={"epochs": 40, "warmup_steps": 10},
        recovery={"max_restarts": 3, "backoff_s": 0.0, "min_nodes": 1},
    )
    demo.wait_for_step(name, 7, job)
    demo.cluster.kill_node("n1")
    demo.completed(name, job, restarts="1")
    assert len(demo.losses(name)) == 40 * 22
    lines = (demo.run(name) / "goodput.jsonl").read_text().splitlines()
    begun = [line for line in map(json.loads, lines) if line["event"] == "begin"]
    assert [line["ranks"] for line in begun] == [2, 1, 2]
    alone, again = begun[1:]
    assert 0 < alone["from_step"] < again["from_step"], "it trained on one node, and saved that"


@pytest.mark.full
def test_training_goes_on_in_the_next_start_without_the_node_that_was_left_out(demo: Demo) -> None:
    """The spare takes the place of a node with two faults, and a request to stop queues the job again."""
    name = "left-out"
    recovery = {"max_restarts": 5, "spare_nodes": 1, "backoff_s": 0.0}
    resources = {"nodes": 1, "gpus_per_node": 1}
    job = demo.submit(name, resources=resources, optim={"epochs": 3}, recovery=recovery)
    for restart in (1, 2):
        demo.wait_for_step(name, max(demo.losses(name), default=0) + 7, job)
        for pid in processes(demo, "n1", RANK):
            os.kill(pid, signal.SIGKILL)
        while len(_restarts(demo, name)) < restart:
            assert demo.cluster.job(job)["JobState"] == "RUNNING", demo.output(name, job)
            time.sleep(0.5)
    demo.wait_for_step(name, _restarts(demo, name)[-1]["from_step"] + 7, job)
    assert "from the memory of n1" in demo.output(name, job).rpartition("generation 3: ")[2]
    left_out = [[node["node"] for node in row["left_out"]] for row in _restarts(demo, name)]
    assert left_out == [[], ["n1"]]
    demo.cluster.run("scancel", "--batch", "--signal=USR2", job)
    assert demo.completed(name, job, restarts="1")["ExcNodeList"] == "n1"
    said = demo.output(name, job)
    assert "the next start does without node n1" in said
    assert f"start 2 of job {job} on n[2-3]" in said
    assert len(demo.losses(name)) == 66


def _restarts(demo: Demo, name: str) -> list[dict[str, Any]]:
    path = demo.run(name) / "restarts.json"
    return list(json.loads(path.read_text())["restarts"]) if path.exists() else []


@pytest.mark.horovod
def test_ranks_over_mpi_that_are_all_killed_at_once_start_again_in_the_same_job(demo: Demo) -> None:
    """No supervisor is left to ask for it; the script takes the request that lies in the run folder."""
    name = "killed-together"
    job = demo.submit(
        name,
        resources=TWO_NODES,
        checkpoint={"every_steps": 5},
        optim=SHORTENED,
        recovery={"max_restarts": 3, "backoff_s": 0.0},
        **OVER_MPI,
    )
    demo.wait_for_step(name, 7, job)
    killed = int(time.time())
    for node in ("n1", "n2"):  # Slurm kills one node after the other, and a supervisor that lives longer asks
        os.kill(processes(demo, node, SUPERVISOR)[0], signal.SIGSTOP)
    demo.cluster.run("scancel", "--signal=KILL", f"{job}.0")
    demo.completed(name, job)
    said = demo.output(name, job)
    assert "clipship: the ranks were killed before a supervisor could say why" in said
    assert len(demo.losses(name)) == STEPS
    (restart,) = demo.result(name)["restarts"]
    assert (restart["kind"], restart["node"]) == ("lost", "")
    assert restart["from_step"] >= 5
    assert restart["time"] >= killed, "its seconds count from there"
