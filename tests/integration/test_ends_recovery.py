"""With `[recovery]`, all ranks go on after a rank died or hung, in the same start and to the same result."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ends import (
    CLIPSHIP,
    HOROVOD,
    HOROVOD_MPIRUN,
    MPIRUN,
    SHORT,
    STARTS,
    End,
    begin,
    full,
    losses,
    restarts,
    write_job,
)
from tests.support.runs import events
from tests.support.two_nodes import begin_on_two_nodes, run_on_two_nodes
from trainer.cli.main import main

NODE = os.uname().nodename
STEPS = 6


def start(
    folder: Path,
    fault: str = "",
    backend: str = "torch",
    launcher: str = "clipship",
    *,
    code: int = 0,
    **keys: Any,
) -> End:
    """A whole run, which leaves with this exit code and whose ranks may be restarted three times."""
    folder.mkdir(exist_ok=True)
    recovery = {"max_restarts": 3, **keys.pop("recovery", {})}
    running = begin(folder, backend, launcher, fault, recovery=recovery, **{"steps": STEPS, **keys})
    return running.all_end(code)


def evaluations(folder: Path) -> list[int]:
    """Steps of the evaluations in metrics.jsonl, in the order in which they stand."""
    return [event["step"] for event in events(folder) if "zero_shot_top1" in event]


def weights(folder: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(
        folder / "checkpoints" / f"step-{step:08d}" / "model.pt", weights_only=True
    )
    return state


def same(one: End, other: End, step: int = STEPS) -> bool:
    """Returns whether losses and the weights of the last step are equal, bit for bit."""
    ours, theirs = weights(one.folder, step), weights(other.folder, step)
    assert ours.keys() == theirs.keys()
    return losses(one.folder) == losses(other.folder) and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., End]:
    """The run that nothing disturbs, made once for each start and job."""
    known: dict[str, End] = {}

    def run(*start_of: str, **keys: Any) -> End:
        name = json.dumps([start_of, keys])
        if name not in known:
            known[name] = start(tmp_path_factory.mktemp("whole"), "", *start_of, **keys)
        return known[name]

    return run


@pytest.mark.fault("rank SIGKILLed in a step, in evaluation, in a checkpoint", goes_on=True)
def test_run_whose_ranks_are_killed_goes_on_and_ends_with_the_same_bits(
    tmp_path: Path, whole: Callable[..., End], capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 first, then rank 0, which holds the lock of the run folder and serves the store.

    No step is done again: each node has the newest one in memory. Checkpoints are those of steps 2 and 4.
    """
    end = start(tmp_path, "kill:1:step:4:1,kill:0:step:6:2")
    line = (
        f"clipship: rank {{victim}} on {NODE}{{generation}}: killed by SIGKILL in step, step {{fault}}; "
        "restart 1 of 3: all ranks go on from step {saved}"
    )
    assert [said for said in end.errors.splitlines() if "restart" in said] == [
        line.format(victim=1, fault=4, saved=3, generation=""),
        line.format(victim=0, fault=6, saved=5, generation=", generation 2"),
    ], "the count began anew with the checkpoint of step 4"
    assert same(whole(), end)
    for file in ("result.json", "exit.json", "restarts.json"):
        found = restarts(end.folder, file)
        assert [(each["rank"], each["step"], each["from_step"]) for each in found] == [(1, 4, 3), (0, 6, 5)]
        assert all(0 < each["seconds"] < 120 and each["node"] == NODE for each in found)
    assert restarts(whole().folder) == []
    environment = json.loads((end.folder / "environment.json").read_text())
    assert [rank["generation"] for rank in environment] == ["3", "3"]
    for rank in (0, 1):
        log = (end.folder / "logs" / f"rank-{rank:05d}.log").read_text()
        assert [int(part.split()[0]) for part in log.split(", generation ")[1:]] == [1, 2, 3]
        lines = [line.partition(" INFO ")[2] for line in log.splitlines() if " INFO " in line]
        marks = [part for line in lines if (part := line.partition("start        generation ")[2])]
        assert [mark.partition(":")[0] for mark in marks] == ["2", "3"]
    for file in ("metrics.jsonl", "ranks.jsonl"):
        written = [json.loads(line) for line in (end.folder / file).read_text().splitlines()]
        generations = {line["step"]: line["generation"] for line in written}
        assert generations == {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3}
    result = json.loads((end.folder / "result.json").read_text())
    lost_s = result["seconds"] * (1 - result["useful_share"])
    assert sum(result["lost_s"].values()) == pytest.approx(lost_s, abs=1.0)
    assert result["seconds"] > sum(each["seconds"] for each in result["restarts"]), "of all generations"
    assert result["lost_s"]["recovery"] > result["lost_s"]["redone"] >= 0
    capsys.readouterr()
    assert main(["status", str(end.folder)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert any(line.startswith("useful ") and "recovery" in line for line in shown)
    rows = [line for line in shown if line.startswith("restart ")]
    assert len(rows) == 2
    assert (
        f"rank 0 on {NODE}: killed by SIGKILL in step, step 6; all ranks went on from step 5, new step after"
        in rows[1]
    )


@pytest.mark.fault("rank raises")
def test_same_fault_at_the_same_step_ends_the_run_as_a_bug(tmp_path: Path) -> None:
    """Without steps in memory it goes on from the checkpoint before."""
    end = start(tmp_path, "raise:1:step:4", code=1, recovery={"keep_in_memory": False})
    assert [line.partition("; restart ")[2] for line in end.errors.splitlines() if "; restart " in line] == [
        "1 of 3: all ranks go on from step 2"
    ]
    assert (
        f"rank 1 on {NODE}, generation 2, ended the run with exit code 1: ValueError: a fault of the test; "
        in end.errors
    )
    assert "the same fault at the same step 2 times in a row looks like a bug" in end.errors
    record = json.loads((end.folder / "exit.json").read_text())
    assert (record["exit_code"], len(record["restarts"]), record["restarts"][0]["seconds"]) == (1, 1, None)


KILLED = "rank SIGKILLed in a step, in evaluation, in a checkpoint"
LATE = "rank SIGSTOPped or stuck, rank 0 too"
LOADER = "loader stalls; loader worker killed"
SUPERVISOR = "supervisor SIGKILLed, rank 0's too"
THIRTY = {"steps": 30, "data": {"workers": 1}}
"""Some batches are ready when a loader fails, so the fault shows some steps later."""


def cases() -> Iterator[object]:
    """Row of the table, start, fault, begin of the restart's cause and keys of the job."""
    for at in STARTS:
        for phase, step in (("step", 3), ("evaluation", 4), ("checkpoint", 4)):
            for victim in (0, 1):
                yield case(KILLED, at, f"kill:{victim}:{phase}:{step}", f"killed by SIGKILL in {phase}, ")
    for at, victim in product((CLIPSHIP, HOROVOD), (0, 1)):  # its part of step 3 in memory is torn
        yield case(KILLED, at, f"kill:{victim}:keeping:3", "killed by SIGKILL in ")
    for at, victim in product((CLIPSHIP, MPIRUN, HOROVOD), (0, 1)):
        yield case(LATE, at, f"stop:{victim}:step:3", "stopped by a signal in step, step 3")
        yield case(LATE, at, f"slow:{victim}:step:3", "timed out: step, step 3, lasts longer than")
    for at, deed in product((CLIPSHIP, HOROVOD), ("worker-kill", "worker-stop")):
        yield case(LOADER, at, f"{deed}:1:step:3", "", **THIRTY)
    for at, victim in product((MPIRUN, HOROVOD_MPIRUN), (0, 1)):  # which ends with a supervisor
        yield case(SUPERVISOR, at, f"orphan:{victim}:step:4", "")


def case(row: str, at: Any, fault: str, cause: str, **keys: Any) -> object:
    marks = [*at.marks, full, pytest.mark.fault(row, goes_on=True)]
    return pytest.param(at.values, fault, cause, keys, id=f"{at.id}-{fault}", marks=marks)


@pytest.mark.parametrize(("start_of", "fault", "cause", "keys"), list(cases()))
def test_a_fault_costs_a_restart_and_no_bit(
    tmp_path: Path,
    whole: Callable[..., End],
    start_of: tuple[str, str],
    fault: str,
    cause: str,
    keys: dict[str, Any],
) -> None:
    deed, victim, phase, *_ = fault.split(":")
    then: dict[str, Any] = {} if deed in ("kill", "orphan") else {"then": SHORT}
    backend, launcher = start_of
    end = start(tmp_path, f"{fault}:1", backend, launcher, **then, **keys)
    (restart,) = restarts(end.folder)
    assert restart["kind"] == ("lost" if deed == "orphan" else "fault")
    assert restart["cause"].startswith(cause)
    assert deed == "orphan" or restart["rank"] == int(victim)
    assert deed != "slow" or f"late: rank {victim}" in restart["details"]
    assert phase != "keeping" or restart["from_step"] == 2
    assert not (end.folder / "diagnosis.json").exists(), "that is of the end of a run"
    assert same(whole(*start_of, **keys), end, keys.get("steps", STEPS))
    assert evaluations(end.folder) == list(range(2, keys.get("steps", STEPS) + 1, 2))


@full
@pytest.mark.fault("rank raises", goes_on=True)
def test_fault_during_a_restart_is_another_fault(tmp_path: Path) -> None:
    end = start(tmp_path, "raise:1:step:3:1,kill:0:first step:3:2", recovery={"backoff_s": 0.1})
    assert [each["cause"].partition(" in ")[0] for each in restarts(end.folder)] == [
        "ValueError: a fault of the test",
        "killed by SIGKILL",
    ]
    assert "restart 2 of 3: all ranks go on from step 2" in end.errors
    assert list(losses(end.folder)) == list(range(1, STEPS + 1))


@full
def test_restarts_without_a_new_checkpoint_are_used_up(tmp_path: Path) -> None:
    end = start(tmp_path, "kill:1:step:3:1,kill:0:first step:3:2", code=1, recovery={"max_restarts": 1})
    assert (
        "1 restart without a new checkpoint in between is all that recovery.max_restarts allows" in end.errors
    )


@full
@pytest.mark.fault("SIGTERM to the launcher", goes_on=True)
def test_stop_between_two_generations_ends_with_75_and_the_run_goes_on_later(tmp_path: Path) -> None:
    recovery = {"max_restarts": 3, "backoff_s": 200.0}
    faults = "kill:1:step:3:1,kill:0:first step:3:2"
    running = begin(tmp_path, "torch", "clipship", faults, steps=STEPS, recovery=recovery)
    record = running.folder / "restarts.json"
    running.until(lambda: record.exists() and len(json.loads(record.read_text())["restarts"]) == 2)
    running.process.send_signal(signal.SIGTERM)
    end = running.all_end(75)
    assert "asked to stop during a restart of the ranks" in end.errors
    again = start(tmp_path)
    assert "start        step 2" in again.output
    assert restarts(again.folder) == []


@full
@pytest.mark.fault("SIGTERM to the launcher", goes_on=True)
def test_stop_after_a_restart_saves_and_leaves_with_75(tmp_path: Path) -> None:
    running = begin(
        tmp_path, "torch", "clipship", "kill:1:step:3:1", steps=100_000, recovery={"max_restarts": 3}
    )
    running.reached(5)
    running.process.send_signal(signal.SIGTERM)
    end = running.all_end(75)
    assert "is saved, and the run can go on (exit code 75)" in end.errors
    assert len(restarts(end.folder, "exit.json")) == 1


@pytest.mark.fault("supervisor SIGKILLed, rank 0's too", goes_on=True)
def test_run_whose_supervisors_are_killed_goes_on_and_ends_with_the_same_bits(
    tmp_path: Path, whole: Callable[..., End]
) -> None:
    """The launcher starts rank 1's and then rank 0's supervisor again; the other coordinates then."""
    end = start(tmp_path, "orphan:1:step:3:1,orphan:0:step:5:2")
    assert [(each["kind"], each["rank"], each["ranks"]) for each in restarts(end.folder)] == [
        ("lost", 1, 2),
        ("lost", 0, 2),
    ]
    assert same(whole(), end)


@full
@pytest.mark.fault("supervisor SIGKILLed, rank 0's too", goes_on=True)
def test_run_whose_first_supervisor_is_killed_before_the_others_reach_it_goes_on(tmp_path: Path) -> None:
    end = start(tmp_path, "gone:0:start:0", timeouts={"init_s": 60.0})
    assert "rank 0's supervisor is started again" in end.errors
    assert list(losses(end.folder)) == list(range(1, STEPS + 1))


@pytest.mark.fault("supervisor SIGKILLed, rank 0's too")
def test_lost_supervisor_ends_the_run_when_restarts_are_used_up(tmp_path: Path) -> None:
    # The next generation goes on from step 2 or, if the ranks have kept it until they are ended, from step 3.
    end = start(tmp_path, "orphan:1:step:3,orphan:1:step:4", code=1, recovery={"max_restarts": 1})
    assert "its supervisor is gone" in end.errors
    assert "1 restart without a new checkpoint in between is all that recovery.max_restarts" in end.errors


@full
@pytest.mark.fault("node lost, the coordinator's too", goes_on=True)
@pytest.mark.parametrize("lost", [(0, 1), (2, 3)], ids=["coordinator's node", "other node"])
def test_run_goes_on_with_the_ranks_of_the_node_that_is_left(tmp_path: Path, lost: tuple[int, int]) -> None:
    def job(folder: Path, fault: str) -> Path:
        folder.mkdir()
        return write_job(
            folder,
            "torch",
            "clipship",
            fault,
            steps=STEPS,
            recovery={"max_restarts": 3, "min_nodes": 1},
            optim={"global_batch_size": 16},
        )

    whole = run_on_two_nodes(job(tmp_path / "whole", ""))
    ends = run_on_two_nodes(job(tmp_path / "faulty", f"lose:{lost[0]}:step:3:1"))
    assert [code for code, _ in whole] == [0] * 4
    assert [code for code, _ in ends] == [-9 if rank in lost else 0 for rank in range(4)], ends
    runs = [tmp_path / name / "runs" / "ends" for name in ("whole", "faulty")]
    (restart,) = restarts(runs[1])
    assert (restart["kind"], restart["ranks"], restart["from_step"]) == ("lost", 2, 2)
    ours, theirs = map(losses, runs)
    assert ours.keys() == theirs.keys()
    assert theirs == pytest.approx(ours, rel=1e-4), "the same samples, in another order of additions"


@full
@pytest.mark.fault("node frozen or cut off, rank 0's too", goes_on=True)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("deed", ["halt", "freeze"])
def test_rank_of_a_stopped_supervisor_ends_itself_and_the_other_node_goes_on(
    tmp_path: Path, deed: str, victim: int
) -> None:
    """When the supervisor continues, the run is over; it changes nothing in the run folder."""
    path = write_job(
        tmp_path,
        "torch",
        "clipship",
        f"{deed}:{victim}:step:3:1,lag:{victim}:step:3:1",  # a rank without its supervisor trains on
        steps=40,
        checkpoint={"every_steps": 20},
        recovery={"max_restarts": 3, "min_nodes": 1},
        timeouts={"silence_s": 10.0},
    )
    processes = begin_on_two_nodes(path, 1)
    other, stopped = processes[1 - victim], processes[victim]
    try:
        _, said = other.communicate(timeout=280)
        assert other.returncode == 0, said
        assert stopped.poll() is None, "it is stopped"
        assert not trained_by(stopped.pid) or deed == "freeze", "its rank has ended itself"
        folder = tmp_path / "runs" / "ends"
        (restart,) = restarts(folder)
        assert (restart["kind"], restart["ranks"]) == ("lost", 1)
        before = contents(folder)
        stopped.send_signal(signal.SIGCONT)
        _, said = stopped.communicate(timeout=280)
        assert stopped.returncode == 1, said
        assert contents(folder) == before
        assert list(losses(folder)) == list(range(1, 41))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def trained_by(supervisor: int) -> list[int]:
    """Children of a supervisor that train: a fork server has no threads, and what has ended has no tasks."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return [int(child) for child in children if len(list(Path(f"/proc/{child}/task").iterdir())) > 1]


def contents(folder: Path) -> dict[str, bytes]:
    """Contents of all files of a run folder but the logs."""
    files = [path for path in folder.rglob("*") if path.is_file() and "logs" not in path.parts]
    return {str(path): path.read_bytes() for path in files}
