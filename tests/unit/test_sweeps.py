"""`clipship sweep`: here, and with `--to` by a toy scheduler that runs scripts on this machine."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import TOY_JOB, tiny_job
from tests.support.report_folders import failed_run, long_run
from tests.support.report_pages import called, table
from tests.support.toy_scheduler import clipship
from trainer.cli.main import main
from trainer.config.loader import dump_job
from trainer.errors import InputError
from trainer.sweep import trials

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


# The grid of `clipship sweep`: combinations of values, and names of runs.


def test_each_value_meets_each_other_value_and_brackets_and_quotes_hold_commas() -> None:
    found = [" ".join(row) for row in trials.combinations(["optim.lr=1e-4,3e-4", "seed=0, 1"])]
    assert found == [f"optim.lr={lr} seed={seed}" for lr in ("1e-4", "3e-4") for seed in (0, 1)]
    grid = ["data.train=['a.tar', 'b.tar'],'{00..01},c.tar'"]
    assert trials.combinations(grid) == [("data.train=['a.tar', 'b.tar']",), ("data.train='{00..01},c.tar'",)]


@pytest.mark.parametrize(
    ("grids", "said"),
    [
        (["optim.lr"], "give KEY=VALUE,VALUE"),
        (["seed=1,,2"], "a value between two commas is missing"),
        (["data.train=['a,b"], "a bracket or quote is open"),
        (["seed=0", "seed=1"], "is given twice"),
        (["name=a,b"], "a folder of its own"),
        ([f"{key}={','.join(map(str, range(30)))}" for key in ("seed", "optim.steps")], "900 runs"),
    ],
)
def test_what_is_no_grid_is_refused(grids: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        trials.combinations(grids)


def test_a_name_is_safe_as_a_folder_and_no_other_runs() -> None:
    rows = [("data.train=/a/b c.tar", "seed=0"), ("data.train=../x", "seed=1")]
    assert trials.names("run", rows) == ["run-train--a-b-c.tar-seed-0", "run-train-..-x-seed-1"]
    with pytest.raises(InputError, match="would be named run-seed-1"):
        trials.names("run", trials.combinations(["seed=1,1"]))


def test_runs_of_a_job_whose_name_reads_as_toml_have_folders_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(dump_job(tiny_job().model_copy(update={"name": '"x"#1'})))
    found = trials.find_sweep(path, (), ["seed=0,1"], None).trials
    assert [trial.job.name for trial in found] == ['"x"#1-seed-0', '"x"#1-seed-1']
    assert [trial.folder.name for trial in found] == [trial.name for trial in found]


# The page about a sweep, on run folders as ranks leave them.

Capture = pytest.CaptureFixture[str]


def evaluated(folder: Path, top1: float) -> None:
    long_run(folder, steps=100, every=50)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 100, "zero_shot_top1": top1, "zero_shot_samples": 50}) + "\n")


def recorded(runs: Path, values: dict[str, dict[str, str]]) -> Path:
    """The folder of a sweep of the job a."""
    (runs / "a-sweep").mkdir(parents=True)
    (runs / "a-sweep" / "sweep.json").write_text(json.dumps({"job": "a", "runs": values}))
    return runs / "a-sweep"


def results(folder: Path) -> list[list[str]]:
    return table((folder / "sweep.html").read_text().partition("<h2>Results</h2>")[2], "runs")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Folder of a sweep of four runs: two are done, one has failed, one has not begun."""
    runs = tmp_path / "runs"
    evaluated(runs / "a-lr-1", 0.25)
    evaluated(runs / "a-lr-2", 0.75)
    failed_run(runs / "a-lr-3")
    values = {f"a-lr-{lr}": {"optim.lr": f"{lr}e-4"} for lr in (1, 2, 3)}
    return recorded(
        runs, {**values, "a-lr-4<b>": {"optim.lr": "4e-4", "seed": "1"}, "../../etc": {}, "..": {}}
    )


RECORDS = """
import sys
from pathlib import Path
from trainer.run.sweep_record import SweepRecord, record_sweep
Path(f"ready-{sys.argv[1]}").touch()
sys.stdin.read()
for seed in range(20):
    record_sweep(Path("a-sweep"), SweepRecord("a", {f"a-{sys.argv[1]}-{seed}": {}}))
"""


def test_sweeps_of_one_job_that_start_together_are_all_recorded(tmp_path: Path) -> None:
    folder = recorded(tmp_path, {})
    waits, goes = os.pipe()
    words = [sys.executable, "-c", RECORDS]
    started = [subprocess.Popen([*words, name], stdin=waits, cwd=tmp_path) for name in "bcd"]
    limit = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 3 and time.monotonic() < limit:
        time.sleep(0.01)
    os.close(goes)
    assert [process.wait(60) for process in started] == [0] * 3
    os.close(waits)
    assert len(json.loads((folder / "sweep.json").read_text())["runs"]) == 60


def test_each_run_has_a_row_with_its_values_and_results(sweep: Path) -> None:
    """Names in a record lead to no other folder."""
    assert called("report", str(sweep)) == f"{sweep / 'sweep.html'}\n"
    title, first, second, third, fourth = results(sweep)
    assert title[:5] == ["run", "optim.lr", "seed", "state", "step"]
    at = title.index("zero-shot top-1")
    assert (first[:4], first[at]) == (["a-lr-1", "1e-4", "", "done"], "25.0 %")
    assert (second[1], second[at]) == ("2e-4", "75.0 %")
    assert (sweep / "sweep.html").read_text().count('class="own">75.0 %<') == 1
    assert third[3].startswith("failed")
    assert fourth[:4] == ["a-lr-4<b>", "4e-4", "1", "not begun"]


def test_where_the_runs_are_seen_a_list_makes_the_record_that_the_report_needs(
    tmp_path: Path, capsys: Capture
) -> None:
    """Runs on a cluster were submitted on a machine that has the record and not their folders."""
    job = tmp_path / "job.toml"
    job.write_text('name = "a"\n[data]\nformat = "synthetic"\n[optim]\nglobal_batch_size = 16\nsteps = 100\n')
    words = ["sweep", str(job), "--grid", "seed=0,1", "--list"]
    assert main(words) == 0
    assert "clipship report" not in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    long_run(tmp_path / "runs" / "a-seed-1", steps=100, every=50)
    assert main(words) == 0
    folder = tmp_path / "runs" / "a-sweep"
    assert f"clipship report {folder}" in capsys.readouterr().err
    assert main(["report", str(folder)]) == 0
    assert [row[:3] for row in results(folder)[1:]] == [
        ["a-seed-0", "0", "not begun"],
        ["a-seed-1", "1", "done"],
    ]


def test_a_sweep_is_named_alone_and_needs_its_record(sweep: Path, capsys: Capture) -> None:
    assert main(["report", str(sweep), str(sweep.parent / "a-lr-1")]) == 2
    assert "it has a page of its own, so name it alone" in capsys.readouterr().err
    (sweep / "sweep.json").write_text("{")
    assert main(["report", str(sweep)]) == 2
    assert "sweep.json cannot be read" in capsys.readouterr().err


# One row in each table of schedulers is all that the command line needs to serve one more.

JOB = TOY_JOB.replace('"toy"', '"toy run"') + "[nohup]\nnice = 3\n"


def toy_job(folder: Path) -> str:
    """A job file with a section for the toy scheduler."""
    (folder / "job.toml").write_text(JOB)
    return "job.toml"


def test_a_toy_scheduler_renders_checks_submits_and_ends_a_job(tmp_path: Path) -> None:
    job = toy_job(tmp_path)
    script = clipship(tmp_path, "render", "nohup", job)
    assert script.returncode == 0, script.stderr
    assert "renice -n 3" in script.stdout
    assert "'toy run' goes on" in script.stdout
    checked = clipship(tmp_path, "check", job, "--no-data")
    assert "ranks started by bash ([nohup])" in checked.stdout, checked.stderr
    refused = clipship(
        tmp_path, "check", job, "--no-data", "--set", "resources.nodes=2", "--set", "nohup.nicer=1"
    )
    assert "unknown key; did you mean nohup.nice?" in refused.stderr
    submitted = clipship(tmp_path, "submit", job, "--to", "nohup")
    assert submitted.returncode == 0, submitted.stderr
    process = Path("/proc", submitted.stdout.strip())
    try:
        assert process.exists()
        assert "running" in clipship(tmp_path, "status", "toy run").stdout
        limit = time.monotonic() + 60
        while "[0] toy run goes on" not in (said := clipship(tmp_path, "logs", "toy run").stdout):
            assert time.monotonic() < limit, said
    finally:
        cancelled = clipship(tmp_path, "cancel", "toy run")
    assert "was asked to end" in cancelled.stderr
    deadline = time.monotonic() + 30
    while process.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "over" in clipship(tmp_path, "status", "toy run").stdout


def test_check_reports_what_a_scheduler_refuses(tmp_path: Path) -> None:
    refused = clipship(tmp_path, "check", toy_job(tmp_path), "--no-data", "--set", "resources.nodes=2")
    assert refused.returncode == 2
    assert "nohup has this node alone" in refused.stderr
