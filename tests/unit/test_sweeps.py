"""`clipship sweep`: here, and with `--to` by a toy scheduler that runs scripts on this machine."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import TOY_JOB
from tests.support.toy_scheduler import clipship
from trainer.cli.main import main

GRID = ("--grid", "seed=0,1")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "job.toml").write_text(TOY_JOB)
    yield tmp_path
    for record in tmp_path.glob("*/*/artefacts/submission.json"):
        assert clipship(tmp_path, "cancel", str(record.parents[1])).returncode == 0


def cancel(folder: Path, run: Path) -> None:
    """Ends the run, and waits until its scheduler says so."""
    assert clipship(folder, "cancel", str(run)).returncode == 0
    limit = time.monotonic() + 60
    while "over" not in clipship(folder, "status", str(run)).stdout:
        assert time.monotonic() < limit


def test_no_run_is_submitted_if_any_of_them_cannot_work(folder: Path) -> None:
    refused = clipship(folder, "sweep", "job.toml", "--grid", "resources.nodes=1,2", "--to", "nohup")
    assert refused.returncode == 2
    assert "no run was started\nresources.nodes=2: " in refused.stderr
    assert "nohup has this node alone" in refused.stderr
    assert refused.stdout == ""
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(("to", "kept"), [("nohup", "runs"), ("faraway", "records")])
def test_a_repeated_sweep_submits_only_runs_that_the_scheduler_does_not_have(
    folder: Path, to: str, kept: str
) -> None:
    submitted = clipship(folder, "sweep", "job.toml", *GRID, "--to", to)
    assert submitted.returncode == 0, submitted.stderr
    first = submitted.stdout.split()[0]
    assert {path.name for path in (folder / kept).iterdir()} == {"toy-seed-0", "toy-seed-1", "toy-sweep"}

    again = clipship(folder, "sweep", "job.toml", *GRID, "--to", to)
    assert again.stdout == ""
    assert f"toy-seed-0 was submitted to {to} as {first}" in again.stderr

    cancel(folder, folder / kept / "toy-seed-1")
    listed = clipship(folder, "sweep", "job.toml", *GRID, "--to", to, "--list").stdout.splitlines()
    assert [row.split()[:3] for row in listed[1:]] == [
        ["toy-seed-0", "0", "running"],
        ["toy-seed-1", "1", "over"],
    ]


def test_a_sweep_on_this_machine_leaves_alone_what_a_scheduler_still_has(folder: Path) -> None:
    submitted = clipship(folder, "sweep", "job.toml", "--grid", "seed=0", "--to", "nohup")
    here = clipship(folder, "sweep", "job.toml", "--grid", "seed=0", "--nproc", "1")
    assert here.returncode == 0, here.stderr
    assert f"toy-seed-0 was submitted to nohup as {submitted.stdout.strip()}" in here.stderr
    assert "run 1 of" not in here.stderr
    assert here.stdout.splitlines()[-1].split() == ["toy-seed-0", "0", "running"]


def test_a_run_that_has_ended_without_being_done_is_submitted_again(folder: Path) -> None:
    clipship(folder, "sweep", "job.toml", "--grid", "seed=0", "--to", "nohup")
    cancel(folder, folder / "runs/toy-seed-0")
    again = clipship(folder, "sweep", "job.toml", "--grid", "seed=0", "--to", "nohup")
    assert re.fullmatch(r"\d+\n", again.stdout), again.stderr


def test_submit_says_the_warnings_of_check(folder: Path) -> None:
    changed = ("--set", "optim.warmup_steps=100", "--set", "optim.lr=5e-4")
    submitted = clipship(folder, "submit", "job.toml", "--to", "nohup", *changed)
    assert submitted.returncode == 0, submitted.stderr
    assert "warning: warmup_steps 100 is longer than the run of 4 steps: lr 0.0005 is" in submitted.stderr


def test_no_check_is_for_runs_that_are_submitted(folder: Path) -> None:
    refused = clipship(folder, "sweep", "job.toml", *GRID, "--no-check")
    assert (refused.returncode, "--no-check is for --to" in refused.stderr) == (2, True)


def test_runs_that_would_have_the_same_name_on_kubernetes_are_refused(folder: Path) -> None:
    (folder / "job.toml").write_text(f"""{TOY_JOB}
[logging]
runs = "/data/runs"
[image]
tag = "clip:1"
[kubernetes]
name = "mine"
mounts."/data" = "pvc:clip-data"
""")
    refused = clipship(folder, "sweep", "job.toml", *GRID, "--to", "kubernetes")
    assert refused.returncode == 2
    assert "toy-seed-0 and toy-seed-1 would both be named mine on kubernetes" in refused.stderr


@pytest.mark.parametrize(
    ("ends", "code", "runs"),
    [
        (75, 75, 1),
        (129, 129, 1),  # SIGHUP
        (143, 143, 1),  # SIGTERM, before the supervisors heard of it
        (137, 1, 2),  # a rank that the kernel killed
        (1, 1, 2),
        (0, 0, 2),
    ],
)
def test_a_run_that_was_asked_to_stop_ends_the_sweep(
    ends: int, code: int, runs: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def run(job: object, **_: Any) -> int:
        started.append(job)
        return ends

    monkeypatch.setattr("trainer.launch.local.run", run)
    monkeypatch.chdir(folder)
    assert main(["sweep", "job.toml", "--grid", "seed=0,1", "--nproc", "1"]) == code
    assert len(started) == runs
