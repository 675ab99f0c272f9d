"""A job that goes on in its allocation without a supervisor or a node, on a real Slurm.

The first tests look at Slurm and the batch script alone: in place of supervisors, programs run that write
down when they start, and leave when the run folder has an end.
"""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.slurm.runs import Demo

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]
TWO_NODES = {"gpus_per_node": 1}
_SUPERVISOR = """\
#!/bin/sh
run=$(dirname "$(dirname "$4")")
echo "$SLURM_PROCID $SLURMD_NODENAME ${CLIPSHIP_RESPAWNED:-0} $$ $CLIPSHIP_TOKEN" >>"$run/started"
until [ -s "$run/exit.json" ]; do sleep 0.2; done
exit "$(sed -n 's/.*"exit_code": \\([0-9]*\\).*/\\1/p' "$run/exit.json")"
"""


class StandIns:
    """Job whose supervisors only write down when they start."""

    def __init__(self, demo: Demo, name: str, **recovery: int) -> None:
        python = demo.folder / "supervisor"
        python.write_text(_SUPERVISOR)
        python.chmod(0o755)
        self.demo, self.name = demo, name
        self.job = demo.submit(
            name,
            resources=TWO_NODES,
            slurm={"python": str(python)},
            recovery={"max_restarts": 3, **recovery},
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
        path = self.demo.run(self.name) / "exit.json"
        path.with_suffix(".new").write_text(json.dumps(record, indent=2))
        path.with_suffix(".new").rename(path)

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
    """The batch script runs there, and Slurm would leave the rest of the job as it is."""
    run = StandIns(demo, "first-node")
    run.until_started(2)
    demo.cluster.kill_node("n1")
    run.until_started(4)
    assert {line[1] for line in run.started()[2:]} == {"n2", "n3"}, demo.output(run.name, run.job)
    run.end(0)
    ended = demo.wait(run.name, run.job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")


def test_training_goes_on_in_the_same_job_with_a_spare_in_a_lost_nodes_place(demo: Demo) -> None:
    name = "with-a-spare"
    recovery = {"max_restarts": 3, "spare_nodes": 1, "backoff_s": 0.0}
    job = demo.submit(
        name,
        resources=TWO_NODES,
        checkpoint={"every_steps": 5},
        optim={"epochs": 4},
        recovery=recovery,
    )
    demo.wait_for_step(name, 7, job)
    demo.cluster.kill_node("n2")
    ended = demo.wait(name, job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), demo.output(name, job)
    assert sorted(demo.losses(name)) == list(range(1, 89))
    restarts = demo.result(name)["restarts"]
    assert [(each["kind"], each["node"], each["ranks"]) for each in restarts] == [("lost", "n2", 2)]


def _process(demo: Demo, node: str, mark: bytes) -> int:
    """Returns the process of the node whose command line has the mark, and that is no shell around it."""
    return next(
        pid for pid in demo.cluster.members(node) if mark in (line := _command(pid)) and b"\0-c\0" not in line
    )


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


RANK, SUPERVISOR = b"\0trainer.supervise.rank_start\0", b"\0trainer.rank\0"
OVER_MPI = {"comm": {"backend": "horovod", "deterministic": False}}


@pytest.mark.full
@pytest.mark.parametrize(
    ("mark", "recovery", "sections", "kind", "ranks"),
    [
        pytest.param(RANK, {}, {}, "fault", 2, id="rank"),
        pytest.param(SUPERVISOR, {}, {}, "lost", 2, id="supervisor"),
        pytest.param(None, {"min_nodes": 1}, {}, "lost", 1, id="node-fewer"),
        pytest.param(RANK, {}, OVER_MPI, "fault", 2, id="horovod-rank", marks=pytest.mark.horovod),
        pytest.param(SUPERVISOR, {}, OVER_MPI, "lost", 2, id="horovod-supervisor", marks=pytest.mark.horovod),
    ],
)
def test_training_goes_on_in_the_same_job(
    demo: Demo,
    mark: bytes | None,
    recovery: dict[str, int],
    sections: dict[str, dict[str, Any]],
    kind: str,
    ranks: int,
) -> None:
    name = f"goes-on-{kind}-{ranks}-{len(sections)}-{mark is None}"
    job = demo.submit(
        name,
        resources=TWO_NODES,
        checkpoint={"every_steps": 5},
        optim={"epochs": 4},
        recovery={"max_restarts": 3, "backoff_s": 0.0, **recovery},
        **sections,
    )
    demo.wait_for_step(name, 7, job)
    if mark is None:
        demo.cluster.kill_node("n2")
    else:
        os.kill(_process(demo, "n2", mark), signal.SIGKILL)
    ended = demo.wait(name, job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), demo.output(name, job)
    assert sorted(demo.losses(name)) == list(range(1, 89))
    restarts = demo.result(name)["restarts"]
    assert [(each["node"], each["ranks"]) for each in restarts][:1] == [("n2", ranks)]
    assert restarts[0]["kind"] in (kind, "lost")  # under MPI only the request may be left
