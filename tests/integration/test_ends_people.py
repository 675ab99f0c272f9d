"""What people do to runs: edit, copy, remove, submit twice, fill a quota, set the clock back.

Each ends or is refused with its reason, and a run that trains goes on, without a loss that nobody is told of.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

from tests.support import clock_back
from tests.support.ends import begin
from tests.support.processes import command_line, ended_on_failure, until
from tests.support.runs import COMMAND, LIMIT_S, TinyRun, clipship, descendants, tiny_run
from trainer.cli.main import main

EDITED = "job file edited, between two starts or while it trains"
REMOVED = "half of the run folder removed, checkpoints or records"
MOVED = "run folder copied, renamed or moved"
NOBODY = 65534


def has_restarted(run: Path) -> bool:
    """Returns whether ranks that were started again have done a new step."""
    record = run / "restarts.json"
    return record.exists() and bool(json.loads(record.read_text())["restarts"][0]["seconds"])


def rank_of(launcher: int) -> int:
    """Returns the process of a rank."""
    return next(pid for pid in descendants(launcher) if b"rank_start" in command_line(pid))


@pytest.mark.fault(EDITED, goes_on=True)
@pytest.mark.fault(REMOVED, goes_on=True)
@pytest.mark.fault(MOVED, goes_on=True)
def test_a_run_goes_on_while_people_edit_its_job_copy_its_folder_and_remove_half_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank dies after all that. Then the folder is moved, and the run goes on there."""
    run = TinyRun(tmp_path)
    recovery = {"max_restarts": 3, "backoff_s": 0.0}
    job = run.write(optim={"steps": 100_000}, checkpoint={"every_steps": 10}, recovery=recovery)
    command = subprocess.Popen(run.command(2), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with ended_on_failure(command) as process:
        until(lambda: run.last_step() > 12, process)
        job.write_text(job.read_text().replace("lr = 0.001", "lr = 1e30"))
        shutil.copytree(run.run, tmp_path / "copy")
        for path in (tmp_path / "copy").rglob("*"):  # a minute ago, when no restart can be under way
            os.utime(path, (time.time() - 60,) * 2)
        assert main(["status", str(tmp_path / "copy")]) == 0
        for name in ("checkpoints", "logs"):
            shutil.rmtree(run.run / name, ignore_errors=True)
        (run.run / "metrics.jsonl").unlink()
        until(lambda: run.last_step() > 0, process)
        os.kill(rank_of(process.pid), signal.SIGKILL)
        until(lambda: has_restarted(run.run), process)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=LIMIT_S)[0]
        assert process.returncode == 75, said
    shown = capsys.readouterr().out
    assert f"writes to {run.run}: this is a copy" in shown
    assert "first rename the folder to tiny, which the run is called" in shown
    steps = list(run.losses())
    assert steps == list(range(steps[0], steps[-1] + 1)), "no record is lost after the file was"
    assert f"asked to stop: step {steps[-1]} " in (run.run / "logs" / "rank-00000.log").read_text()
    assert tomllib.loads((run.run / "job.toml").read_text())["optim"]["lr"] == 1e-3
    moved = (tmp_path / "elsewhere" / "tiny").absolute()
    moved.parent.mkdir()
    run.run.rename(moved)
    done = clipship("resume", moved, "--shorter", f"steps={steps[-1] + 2}")
    assert f"start        step {steps[-1]}, from {moved}" in done.stdout
    assert json.loads((moved / "result.json").read_text())["steps"] == steps[-1] + 2
    assert not run.run.exists()


@pytest.mark.fault(REMOVED)
@pytest.mark.fault(MOVED)
@pytest.mark.fault("run folder of another user")
@pytest.mark.skipif(shutil.which("setpriv") is None or os.geteuid() != 0, reason="needs root and setpriv")
def test_what_would_lose_a_killed_run_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checkpoints are gone, its folder has another name, or belongs to somebody else."""
    run = tiny_run(tmp_path, checkpoint={"every_steps": 3})
    run.start_and_kill(1, at_step=8)
    renamed = run.run.with_name("renamed")
    shutil.copytree(run.run, renamed)
    assert main(["resume", str(renamed)]) == 2
    assert "the run is tiny, so its folder needs that name" in capsys.readouterr().err
    for folder in (run.run, *run.run.rglob("*")):
        os.chown(folder, NOBODY, NOBODY)
    as_nobody_s_guest = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"]  # root that may not write there
    refused = subprocess.run([*as_nobody_s_guest, *run.command(1)], capture_output=True, text=True)
    assert refused.returncode == 2, refused.stderr
    assert f"run folder: no permission to write in {run.run}: choose another folder" in refused.stderr
    before = (run.run / "metrics.jsonl").read_bytes()
    checkpoints = (run.run / "checkpoints").rename(tmp_path / "checkpoints")
    refused = run.start(1, code=2)
    assert re.search(r"the checkpoint of step \d+ was saved, and .*checkpoints has none", refused.stderr)
    assert "`clipship run --fresh`" in refused.stderr
    assert (run.run / "metrics.jsonl").read_bytes() == before
    assert main(["status", str(run.run)]) == 0
    assert "first put its checkpoints back" in capsys.readouterr().out
    checkpoints.rename(run.run / "checkpoints")


@pytest.mark.fault("two submits of one run at once")
def test_of_two_submits_at_once_the_scheduler_gets_one(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, script in (
        ("sbatch", f"sleep 1; echo $$ | tee -a {tmp_path}/queued"),
        ("squeue", "echo 'RUNNING|0:05|1:00|1|None|n1'"),
    ):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    job = TinyRun(tmp_path).write(slurm={"gpus": "none"}, logging={"runs": str(tmp_path / "runs")})
    command = [*COMMAND, "submit", str(job), "--to", "slurm"]
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    both = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.communicate(timeout=LIMIT_S)[1]: process.returncode for process in both}
    assert sorted(said.values()) == [0, 2], said
    (queued,) = (tmp_path / "queued").read_text().split()
    assert any(f"is already Slurm job {queued} (RUNNING)" in text for text, code in said.items() if code)


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        pytest.param(
            "continue",
            0,
            marks=pytest.mark.fault("disk quota used up while a checkpoint is written", goes_on=True),
        ),
        pytest.param("stop", 1, marks=pytest.mark.fault("disk quota used up while a checkpoint is written")),
    ],
)
def test_a_used_up_quota_is_named_and_the_run_follows_its_policy(
    tmp_path: Path, policy: str, code: int
) -> None:
    """Flushes of one step are refused; then somebody makes room."""
    checkpoint, fault = {"on_failure": policy, "keep": 9}, "quota:0:checkpoint:4"
    end = begin(tmp_path, "torch", "clipship", fault, ranks=1, steps=10, checkpoint=checkpoint).end(code)
    said = end.errors + end.output
    assert re.search(r"Disk quota exceeded: the checkpoint of step \d takes ", said)
    assert "(`quota -s`), or have the quota raised" in said
    assert "Traceback" not in said
    assert end.checkpoints[0] == "step-00000002"
    assert "step-00000004" not in end.checkpoints
    assert ("step-00000010" in end.checkpoints) == (policy == "continue")


@pytest.mark.fault("clock set back by two hours")
@pytest.mark.fault("clock set back by two hours", goes_on=True)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_run_whose_clock_is_set_back_goes_on_after_a_fault_and_names_the_next(tmp_path: Path) -> None:
    set_back = clock_back.variables(tmp_path)
    around = ["env", *(f"{name}={value}" for name, value in set_back.items())]
    faults = "back:0:step:3:1,kill:0:step:5:1,kill:0:first step:5:2"
    recovery = {"max_restarts": 1, "backoff_s": 0.0}
    end = begin(tmp_path, "torch", "clipship", faults, ranks=1, around=around, recovery=recovery).end(1)
    assert "restart 1 of 1: all ranks go on from step 4" in end.errors
    assert (
        "generation 2, ended the run with exit code 1: killed by SIGKILL in first step, step 5" in end.errors
    )
    (restart,) = json.loads((end.folder / "exit.json").read_text())["restarts"]
    assert (restart["from_step"], restart["cause"]) == (4, "killed by SIGKILL in step, step 5")
    events = [json.loads(line) for line in (end.folder / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if "loss" in event] == [1, 2, 3, 4]
    goodput = [json.loads(line) for line in (end.folder / "goodput.jsonl").read_text().splitlines()]
    assert min(event["time"] for event in goodput) < time.time() - 3600, "the clock was set back"
    shown = clipship("status", end.folder, code=None, env={**os.environ, **set_back})
    assert "exit code 1, rank 0 on " in shown.stdout, shown.stderr
