"""A run's folder shows whether the run is alive.

A real process holds the lock and is killed, and `status` and `logs` say so.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import clipship
from tests.support.processes import ended_on_failure
from tests.support.report_pages import status, written
from trainer.cli.main import main
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


# `clipship status`, `logs` and `cancel` on run folders as they may be found.
# No scheduler here: tests/cluster has real ones.

Capture = pytest.CaptureFixture[str]


def _record(step: int, **changes: float) -> dict[str, Any]:
    return {"step": step, "epoch": 0, "loss": 2.5, "samples_per_s": 100.0, "step_s": 2.0, **changes}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    (folder / "logs").mkdir(parents=True)
    (folder / "job.toml").write_text('name = "mine"\n[optim]\nsteps = 100\n')
    return folder


def _metrics(folder: Path, *events: dict[str, Any]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_status_of_a_running_run_says_step_speed_time_left_and_checkpoint(run: Path) -> None:
    saved = {"step": 40, "checkpoint": "x/step-00000040"}
    _metrics(run, _record(1, samples_per_s=1.0, step_s=99.0), _record(40), saved, _record(60))
    rows = status(run)
    assert rows["step"].startswith("60 of 100, epoch 1, loss 2.5000, logged ")
    assert (rows["speed"], rows["time left"]) == ("100.0 samples/s", "1:20")
    assert rows["checkpoint"] == "step 40, step-00000040"


def test_status_says_how_much_of_the_time_was_useful_and_where_the_rest_went(run: Path) -> None:
    _metrics(run, _record(40))
    assert "useful" not in status(run)
    begin = {"event": "begin", "start": "a", "generation": 1, "began": 100, "from_step": 0, "time": 110}
    lines = [begin, {"event": "steps", "time": 200, "step": 9, "steps": 9, "seconds": 90, "data_s": 10}]
    lines += [{**lines[1], "time": 290, "step": 18}]
    (run / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert status(run)["useful"] == ("89.5 % of 3:10 in steps that counted; lost: start 5.3 %, data 5.3 %")
    rows = [
        line
        for line in clipship("status", run, "--wide", code=0).out.splitlines()
        if line.startswith(("useful", "lost"))
    ]
    assert rows == [
        "useful      89.5 % of 3:10 in steps that counted",
        "lost          5.3 %    10.0 s  starting: from the begin of allocation or stage to the first step",
        "lost          5.3 %    10.0 s  waiting for data",
    ]


@pytest.mark.parametrize("missing", ["epoch", "samples_per_s"])
def test_status_shows_what_the_records_have(run: Path, missing: str) -> None:
    record = _record(40)
    del record[missing]
    _metrics(run, _record(1), record)
    rows = status(run)
    assert rows["step"].startswith("40 of 100")
    assert ("speed" in rows) == (missing != "samples_per_s")


def test_status_and_logs_of_a_failed_run_end_with_why(run: Path) -> None:
    _metrics(run, _record(8))
    cause = {"rank": 3, "node": "n2", "exit_code": 1, "reason": "killed by SIGKILL", "time": 0.0}
    (run / "exit.json").write_text(json.dumps(cause))
    rows = status(run)
    assert rows["ended"].startswith("exit code 1, rank 3 on n2: killed by SIGKILL (")
    assert "time left" not in rows
    _log(run, 0, "Connection closed by peer\n")
    told = clipship("logs", run, code=0)
    assert told.out == "[0] Connection closed by peer\n"
    assert told.err == "clipship: rank 3 on n2 ended the run with exit code 1: killed by SIGKILL\n"


def test_status_shows_the_metrics_that_people_look_for_in_per_cent_and_all_with_wide(run: Path) -> None:
    measured = {"zero_shot_top1": 0.983, "retrieval_i2t_r1": 0.5, "retrieval_i2t_r5": 0.75}
    _metrics(run, _record(100), {"step": 100, **measured, "retrieval_t2i_r1": 0.4, "generation": 1})
    ways = "retrieval image to text R@1 50.0 %, retrieval text to image R@1 40.0 %"
    assert status(run)["evaluation"] == f"step 100: zero-shot top-1 98.3 %, {ways}"
    wide = clipship("status", run, "--wide", code=0).out
    assert "R@5 75.0 %" in next(line for line in wide.splitlines() if line.startswith("evaluation"))
    out = clipship("runs", run.parent, code=0).out
    assert "top-1 98.3 %, i2t R@1 50.0 %, t2i R@1 40.0 %" in out
    assert "R@5" not in out


def test_status_says_why_the_last_evaluation_failed(run: Path) -> None:
    _metrics(run, _record(100), {"step": 100, "evaluation_failed": "bad samples: 4 of 9", "generation": 1})
    (run / "result.json").write_text('{"reason": "done", "evaluation_failed": "bad samples: 4 of 9"}')
    assert status(run)["evaluation"] == "the last one failed: bad samples: 4 of 9"


def test_status_says_how_far_the_copies_are(run: Path) -> None:
    _metrics(run, _record(60))
    record = {"to": "s3://b/mine", "step": 40, "behind": 2, "failed": "the store is gone"}
    (run / "copies.json").write_text(json.dumps(record))
    assert status(run)["copies"] == ("step 40 in s3://b/mine; 2 checkpoints behind: the store is gone")
    assert json.loads(clipship("status", run, "--json", code=0).out)["copies"] == record
    (run / "copies.json").write_text('{"to": "s3://b/mine", "step": null, "behind": 0, "failed": null}')
    assert status(run)["copies"] == "none yet in s3://b/mine"


def test_a_checkpoint_is_asked_for_where_somebody_can_save_one(run: Path) -> None:
    assert "requested" in clipship("checkpoint", run, code=0).err
    (run / "checkpoint.request").unlink()
    (run / "exit.json").write_text('{"exit_code": 1}')
    assert "is not running" in clipship("checkpoint", run, code=2).err
    assert not (run / "checkpoint.request").exists()


def test_a_run_that_is_not_there_or_not_submitted_is_not_cancelled(run: Path) -> None:
    assert "is not a run: give a run folder, a job file" in clipship("cancel", run / "none", code=2).err
    assert "was not submitted: press Ctrl-C" in clipship("cancel", run, code=2).err


OF_PODS = 'name = "mine"\n[data]\ntrain = ["/far/0.tar"]\n[optim]\nglobal_batch_size = 2\nsteps = 1\n'


def test_a_run_whose_folder_is_here_needs_no_cluster(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    job = tmp_path / "job.toml"
    mounts = f'mounts = {{ "{run.parent}" = "host:{run.parent}" }}'
    job.write_text(f'{OF_PODS}[logging]\nruns = "{run.parent}"\n[kubernetes]\n{mounts}\n')
    assert status(job)["run"] == str(run)


KUBERNETES = '{"to": "kubernetes", "id": "a/b", "at": "now", "details": %s}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"to": "slurm"}',
        '{"to": "pbs", "id": "1", "at": "now"}',
        KUBERNETES % "7",
        KUBERNETES % '{"namespace": "a", "name": "b"}',
        KUBERNETES % '{"context": "c", "namespace": 7, "name": "b", "uid": "d"}',
    ],
)
def test_a_broken_record_of_the_submission_is_named(run: Path, text: str) -> None:
    (run / "artefacts").mkdir()
    (run / "artefacts" / "submission.json").write_text(text)
    assert "submission.json" in clipship("status", run, code=2).err


def _log(folder: Path, rank: int, text: str) -> None:
    with open(folder / "logs" / f"rank-{rank:05d}.log", "a") as file:
        file.write(text)


def test_logs_come_in_the_order_of_time_and_lines_of_several_ranks_once(run: Path) -> None:
    at = "2026-01-01 00:00:0{},000 INFO {}\n".format
    _log(run, 0, at(1, "a") + at(3, "failed:") + "  in 0\n")
    _log(run, 11, at(1, "a") + at(2, "b") + at(3, "failed:") + "  in 11\n" + at(9, "a"))
    assert [
        line.replace("2026-01-01 00:00:0", "") for line in clipship("logs", run, code=0).out.splitlines()
    ] == [
        *("[0,11] 1,000 INFO a", "[11] 2,000 INFO b", "[0,11] 3,000 INFO failed:"),
        *("[0]   in 0", "[11]   in 11", "[11] 9,000 INFO a"),
    ]


def _follow(run: Path, monkeypatch: pytest.MonkeyPatch, *happens: Callable[[], object]) -> int:
    """Follows the logs of a run to which this happens while the command sleeps; then it has ended."""
    left: list[Callable[[], object]] = [*happens, lambda: (run / "result.json").write_text("{}")]
    monkeypatch.setattr("time.sleep", lambda _: left.pop(0)())
    return main(["logs", "-f", str(run)])


def test_logs_of_all_ranks_of_one_and_of_one_that_is_not_there(run: Path) -> None:
    _log(run, 0, "a\nSegmentation fau")  # the last words of a rank that was killed
    _log(run, 7, "b\n")
    assert sorted(clipship("logs", run, code=0).out.splitlines()) == [
        "[0] Segmentation fau",
        "[0] a",
        "[7] b",
    ]
    assert clipship("logs", "--rank", "7", run, code=0).out == "[7] b\n"
    assert "rank 9 has no log" in clipship("logs", "--rank", "9", run, code=2).err


def test_following_logs_shows_what_comes_until_the_run_has_ended(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (run / "exit.json").write_text('{"exit_code": 75}')  # of a start before: it may be started again
    _log(run, 0, "half a")
    comes = [lambda: _log(run, 0, " line\n"), lambda: _log(run, 1, "late\n")]
    assert _follow(run, monkeypatch, *comes) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["[0] half a line", "[1] late"]
    assert "the run was stopped: waiting until it is started again" in shown.err


@pytest.mark.parametrize("options", [(), ("-f",)], ids=["once", "followed"])
@pytest.mark.parametrize(
    ("link", "said"),
    [(False, "the run has not started"), (True, "logs cannot be read: Too many levels of symbolic links")],
)
def test_logs_of_a_run_that_nobody_started_and_those_that_cannot_be_listed_are_told_apart(
    tmp_path: Path, options: tuple[str, ...], link: bool, said: str
) -> None:
    (tmp_path / "logs").mkdir()
    if link:
        (tmp_path / "exit.json").write_text('{"exit_code": 75}')
        (tmp_path / "logs").rmdir()
        (tmp_path / "logs").symlink_to("logs")
    assert said in clipship("logs", *options, tmp_path, code=2).err
