"""The end of one rank, or of its supervisor, ends all ranks.

The first cause is reported first, and the exit code is the one of that cause.
"""

import json
import os
from pathlib import Path

import pytest

from tests.support import open_mpi_4
from tests.support.ends import (
    CLIPSHIP,
    DEATH_S,
    HOROVOD,
    HOROVOD_MPIRUN,
    LATEST_S,
    SHORT,
    begin,
    full,
    starts,
    write_job,
)
from tests.support.two_nodes import run_on_two_nodes

NODE = os.uname().nodename


@pytest.mark.fault("rank SIGKILLed in a step, in evaluation, in a checkpoint")
@starts(HOROVOD)
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=full)])
@pytest.mark.parametrize(
    ("phase", "step"),
    [("step", 3), pytest.param("evaluation", 2, marks=full), pytest.param("checkpoint", 2, marks=full)],
)
def test_killed_rank_ends_all_and_is_named_first(
    tmp_path: Path, backend: str, launcher: str, victim: int, phase: str, step: int
) -> None:
    end = begin(tmp_path, backend, launcher, f"kill:{victim}:{phase}:{step}").all_end(1)
    first = end.errors[end.errors.index("clipship: rank ") :]
    assert first.startswith(
        f"clipship: rank {victim} on {NODE} ended the run with exit code 1: "
        f"killed by SIGKILL in {phase}, step {step}"
    )
    assert "Traceback" not in end.errors, "the other rank's failure in a collective is noise"
    assert end.seconds < DEATH_S


@pytest.mark.fault("rank raises")
@starts(CLIPSHIP)
def test_trace_of_the_rank_that_raised_first_is_the_one_that_is_shown(
    tmp_path: Path, backend: str, launcher: str
) -> None:
    end = begin(tmp_path, backend, launcher, "raise:1:step:3").end(1)
    assert f"rank 1 on {NODE} ended the run with exit code 1: ValueError: a fault of the test" in end.errors
    assert end.errors.count("Traceback") == 1
    assert "RuntimeError" not in end.errors
    assert end.seconds < DEATH_S


@pytest.mark.fault("rank leaves with a code and no reason")
def test_rank_that_leaves_no_reason_is_named_with_its_code(tmp_path: Path) -> None:
    end = begin(tmp_path, "torch", "clipship", "exit:1:step:3").end(7)
    assert "exited with code 7 in step, step 3" in end.errors


@pytest.mark.fault("supervisor SIGKILLed, rank 0's too")
@starts(HOROVOD_MPIRUN)
@pytest.mark.parametrize("victim", [pytest.param(0, marks=full), 1])
def test_killed_supervisor_takes_its_rank_with_it_and_ends_all(
    tmp_path: Path, backend: str, launcher: str, victim: int
) -> None:
    end = begin(tmp_path, backend, launcher, f"orphan:{victim}:step:3").all_end(1)
    assert f"rank {victim} on {NODE} ended the run with exit code 1: its supervisor is gone" in end.errors
    left = json.loads((end.folder / "exit.json").read_text())
    assert (left["exit_code"], left["rank"]) == (1, victim), (
        "another supervisor wrote it where rank 0's was killed"
    )
    assert end.seconds < DEATH_S


@pytest.mark.fault("node frozen or cut off, rank 0's too")
@pytest.mark.parametrize("victim", [pytest.param(0, marks=full), 1])
def test_frozen_node_ends_the_run(tmp_path: Path, victim: int) -> None:
    """Rank and supervisor stopped: nobody there answers. A cut-off node looks the same from outside."""
    running = begin(tmp_path, "torch", "clipship", f"freeze:{victim}:step:3", timeouts={"silence_s": 8.0})
    end = running.all_end(1)
    assert (
        f"rank {victim} on {NODE} ended the run with exit code 1: its supervisor is gone: "
        f"it has been silent for 8 s"
    ) in end.errors
    if (
        victim == 0
    ):  # a failure of rank 0's node leaves a diagnosis too: by whoever can still reach the run folder
        assert end.diagnosis["late"] == end.diagnosis["missing"] == [0]
    word = json.loads((end.folder / "exit.json").read_text())
    assert word["time"] - float(running.moment.read_text()) < DEATH_S, (
        "the launcher takes longer to be rid of what is frozen"
    )


@pytest.mark.fault("node gone when a limit passes, rank 0's too")
@pytest.mark.mpi
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=full)])
def test_node_that_is_gone_when_a_limit_passes_is_named(tmp_path: Path, victim: int) -> None:
    """Also rank 0's, whose supervisor would decide: another one does when nobody asks it for its report."""
    end = begin(tmp_path, "torch", "mpirun", f"freeze:{victim}:step:3", then=SHORT).all_end(124)
    assert end.diagnosis["exit_code"] == 124
    assert end.diagnosis["late"] == end.diagnosis["missing"] == [victim]
    assert f"late: rank {victim} on " in end.errors
    assert "its supervisor does not answer" in end.errors
    assert end.seconds < SHORT["step"] + LATEST_S


@pytest.mark.fault("node lost, the coordinator's too")
@pytest.mark.parametrize(
    "lost", [(0, 1), pytest.param((2, 3), marks=full)], ids=["coordinator's node", "other node"]
)
def test_lost_node_ends_the_ranks_of_the_other_and_is_named(tmp_path: Path, lost: tuple[int, int]) -> None:
    ends = run_on_two_nodes(write_job(tmp_path, "torch", "clipship", f"lose:{lost[0]}:step:3"))
    assert [code for code, _ in ends] == [-9 if rank in lost else 1 for rank in range(4)], ends
    record = json.loads((tmp_path / "runs" / "ends" / "exit.json").read_text())
    assert (record["exit_code"], record["node"]) == (1, "ab"[lost[0] // 2])
    assert record["rank"] in lost
    assert record["reason"].startswith("its supervisor is gone")


@pytest.mark.fault("node computes wrong sums, found by the preflight")
def test_node_that_computes_wrong_sums_ends_the_run_before_it_trains(tmp_path: Path) -> None:
    ends = run_on_two_nodes(write_job(tmp_path, "torch", "clipship", "wrong:1:preflight:0"), each=1)
    assert [code for code, _ in ends] == [1, 1]
    record = json.loads((tmp_path / "runs" / "ends" / "exit.json").read_text())
    assert (record["exit_code"], record["rank"], record["node"]) == (1, 1, "b")
    assert "rank 1 on b: all_reduce: 1 of 65536 values are wrong" in record["reason"]
    assert not (tmp_path / "runs" / "ends" / "metrics.jsonl").exists()


@pytest.mark.fault("each end under Open MPI 4")
@open_mpi_4.needed
@open_mpi_4.backends
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("kill:0:step:3", 1),
        pytest.param("kill:1:checkpoint:2", 1, marks=full),
        pytest.param("stop:0:step:3", 124, marks=full),
        pytest.param("slow:1:evaluation:2", 124, marks=full),
        pytest.param("signal:1:step:3", 75, marks=full),
        pytest.param("orphan:0:step:3", 1, marks=full),
        pytest.param("orphan:1:step:3", 1, marks=full),
    ],
)
def test_open_mpi_4_ends_as_open_mpi_5_does(tmp_path: Path, backend: str, fault: str, code: int) -> None:
    running = begin(
        tmp_path,
        backend,
        "mpirun",
        fault,
        python=open_mpi_4.python(horovod=backend == "horovod"),
        steps=2000,
        then=SHORT if code == 124 else {},
    )
    running.all_end(code)
