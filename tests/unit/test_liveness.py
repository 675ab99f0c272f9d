"""A run's folder shows whether the run is alive.

A real process holds the lock and is killed, and `status` and `logs` say so.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import ended_on_failure
from tests.support.report_pages import status, written
from trainer.report.liveness import is_dead

RANK_0 = """
import json, os, sys, time
from pathlib import Path
from trainer.run.lock import hold
folder = Path(sys.argv[1])
hold(folder, sys.argv[2], "first", 1.0, print)
start = f"---- start of rank 0 of 2 on {sys.argv[2]}, process {os.getpid()}, by clipship run"
lines = [f"2026-01-01 00:00:00,000 INFO {start}", "2026-01-01 00:00:01,000 INFO step 40/100 loss 1", ""]
(folder / "logs" / "rank-00000.log").write_text("\\n".join(lines))
(folder / "metrics.jsonl").write_text("".join(
    json.dumps({"step": step, "epoch": 0, "loss": 2.5, "samples_per_s": 100.0, "step_s": 0.5}) + "\\n"
    for step in (20, 40)))
print("begun", flush=True)
time.sleep(600)
"""
Process = subprocess.Popen[bytes]
HERE = os.uname().nodename
LAST = "[0] 2026-01-01 00:00:01,000 INFO step 40/100 loss 1"
STARTING = "starting: no rank has opened the run folder yet"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = written(tmp_path / "runs" / "mine")
    (folder / "logs").mkdir()
    (folder / "job.toml").write_text(
        'name = "mine"\n[optim]\nsteps = 100\n[timeouts]\ninit_s = 300.0\nfirst_step_s = 600.0\n'
        "eval_s = 90.0\n"
    )
    (folder / "environment.json").write_text(
        json.dumps([{"rank": str(rank), "node": HERE, "launcher": "clipship run"} for rank in (0, 1)])
    )
    return folder


@pytest.fixture
def rank_0(folder: Path) -> Iterator[Process]:
    with rank_on(HERE, folder) as process:
        yield process
        process.kill()


@contextmanager
def rank_on(node: str, folder: Path) -> Iterator[Process]:
    command = [sys.executable, "-c", RANK_0, str(folder), node]
    with ended_on_failure(subprocess.Popen(command, stdout=subprocess.PIPE)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        yield process


def kill(process: Process) -> None:
    process.kill()
    process.wait()


def aged(folder: Path, seconds: float) -> None:
    """As if everything had been written so long ago."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - seconds,) * 2)


def test_a_run_whose_process_was_killed_is_dead_and_says_how_it_goes_on(
    tmp_path: Path, folder: Path, rank_0: Process
) -> None:
    (folder / ".lock").chmod(0o444)  # as another user's
    rows = status(folder)
    assert rows["time left"] == "0:30"
    assert not {"dead", "resume", "quiet"} & rows.keys()
    kill(rank_0)
    job = tmp_path / "job.toml"
    job.write_text(
        f'name = "mine"\n[data]\nformat = "synthetic"\n[optim]\nglobal_batch_size = 2\nsteps = 1\n'
        f'[logging]\nruns = "{folder.parent}"\n'
    )
    resume = status(job)["resume"]  # the run folder is named also where the user named the job file
    assert resume == f"`clipship resume {folder}`; no checkpoint was saved: it starts from the beginning"
    for name in ("step-00000030", "aside-step-00000090", "step-00000099"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    (folder / "checkpoints" / "step-00000030" / "manifest.json").write_text("{}")  # the others are not whole
    days = {time.strftime("since %F")}
    rows = status(folder)
    days.add(time.strftime("since %F"))
    assert "time left" not in rows
    assert f"its process {rank_0.pid} on {HERE} is gone, and no rank recorded why it ended" in rows["dead"]
    assert rows["dead"].startswith(tuple(days))
    assert "memory" in rows["why"]
    assert rows["last line"] == LAST
    assert rows["resume"] == f"`clipship resume {folder}`; it resumes at step 30"
    assert rows["checkpoint"] == "step 30, step-00000030"  # though metrics.jsonl does not name it yet


def test_the_last_line_comes_from_the_log_with_an_error_and_not_from_a_copy(
    folder: Path, rank_0: Process
) -> None:
    kill(rank_0)
    (folder / "logs" / "rank-00000-copy.log").write_text("ERROR of another day\n")
    assert status(folder)["last line"] == LAST
    (folder / "logs" / "rank-00001.log").write_text("2026-01-01 00:00:02,000 ERROR CUDA error: no access\n")
    os.utime(folder / "logs" / "rank-00001.log", (1, 1))
    assert status(folder)["last line"] == "[1] 2026-01-01 00:00:02,000 ERROR CUDA error: no access"


def test_a_run_on_another_node_is_dead_once_its_files_are_older_than_its_limits_allow(folder: Path) -> None:
    """A lock that is free here may be one that does not reach here."""
    with rank_on("far-away", folder) as process:
        process.kill()
    assert "time left" in status(folder)
    aged(folder, 300)
    rows = status(folder)
    assert rows["quiet"].startswith("the run has written nothing for 5:0")
    assert f"process {process.pid} on far-away holds the run folder" in rows["quiet"]
    assert not {"dead", "time left"} & rows.keys()
    aged(folder, 300 + 600 + 90 + 1800 + 10)
    rows = status(folder)
    assert (
        f"process {process.pid} on far-away, another machine, has written nothing since, "
        f"for longer than [timeouts] allows, and no rank"
    ) in rows["dead"]
    assert "`dmesg` on far-away says whether memory ran out" in rows["why"]


def test_a_run_that_failed_or_was_stopped_says_how_it_goes_on_and_one_that_is_done_does_not(
    folder: Path,
) -> None:
    (folder / "exit.json").write_text('{"rank": 1, "node": "n2", "exit_code": 1, "reason": "no space left"}')
    assert status(folder)["resume"].startswith(f"`clipship resume {folder}`;")
    (folder / "exit.json").unlink()
    (folder / "result.json").write_text('{"reason": "done"}')
    assert not {"resume", "dead"} & status(folder).keys()


def test_logs_of_a_dead_run_end_and_say_so(folder: Path, rank_0: Process) -> None:
    command = [sys.executable, "-m", "trainer.cli.main", "logs", "-f", str(folder)]
    logs = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with ended_on_failure(logs) as following:
        assert following.stdout is not None
        assert following.stderr is not None
        assert "start of rank 0" in following.stdout.readline()
        assert following.poll() is None
        kill(rank_0)
        # communicate() would lose what readline() has read ahead.
        rest, errors = following.stdout.read(), following.stderr.read()
    assert following.returncode == 0
    assert "step 40/100" in rest
    assert f"the run has died: `clipship status {folder}` says when, why, and how to resume it" in errors


RANK_3 = "[1.0] Out of memory: Killed process 4711 (python) total-vm:1kB"
OTHER = "[2.0] Memory cgroup out of memory: Killed process 9 (cc1plus)"


@pytest.mark.parametrize(
    ("dmesg", "said"),
    [
        (f"echo '{RANK_3}'; echo '{OTHER}'", "the kernel killed rank 3, process 4711 (python)"),
        (f"echo '{OTHER}'", "it names process 9 (cc1plus), for which memory ran out"),
        ("true", "the kernel's log names no rank"),
        ("exit 1", "only root may read"),
    ],
)
def test_the_kernels_log_names_the_rank_that_memory_ran_out_for(
    folder: Path, rank_0: Process, monkeypatch: pytest.MonkeyPatch, dmesg: str, said: str
) -> None:
    kill(rank_0)
    (folder / "logs" / "rank-00003.log").write_text(
        "2026 INFO ---- start of rank 3 of 4 on n1, process 4711, by clipship run\n"
    )
    (folder / "dmesg").write_text(f"#!/bin/sh\n{dmesg}\n")
    (folder / "dmesg").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    assert said in status(folder)["why"]


def test_a_run_that_may_restart_its_ranks_is_not_dead_while_none_of_them_lives(
    folder: Path, rank_0: Process
) -> None:
    with (folder / "job.toml").open("a") as job:
        job.write("[recovery]\nmax_restarts = 3\n")
    kill(rank_0)
    assert not is_dead(folder), "and `logs` goes on"
    assert status(folder)["state"] == STARTING
    for age_s in (-7200.0, 20.0):  # the clock was set back since
        aged(folder, age_s)
        assert is_dead(folder)
        assert "dead" in status(folder)
    cause = {"rank": 1, "node": "n1", "cause": "killed by SIGKILL in step, step 41"}

    def restarted(*restarts: dict[str, object]) -> dict[str, str]:
        """Status when supervisors have just said that they start the ranks again."""
        told = {"restarts": [{**cause, **restart} for restart in restarts]}
        (folder / "restarts.json").write_text(json.dumps(told))
        (folder / ".lock").touch()
        assert not is_dead(folder)
        return status(folder)

    rows = restarted({"from_step": 30, "seconds": None})
    assert "dead" not in rows
    assert rows["restart"] == (
        "rank 1 on n1: killed by SIGKILL in step, step 41; all ranks went on from step 30, no new step yet"
    )
    took = {"from_step": 0, "seconds": 7.5, "parts": {"end": 0.01, "start": 5.2, "restore": 2.29}}
    rows = restarted(*[took] * 5)
    assert rows["restarts"] == "5 in this start, of which the last 3:"
    assert rows["restart"].endswith(
        "all ranks started again from the beginning, new step after 7.5 s (starting processes 5.2 s, "
        "restoring 2.3 s)"
    )
    gone = {"node": "n1", "kind": "gone", "reason": "gone", "members": [2], "since": 1.0}
    assert restarted({**took, "left_out": [gone]})["left out"] == "1 supervisor on n1: gone"
