"""The page about a sweep, on run folders as ranks leave them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.report_folders import failed_run, long_run
from tests.support.report_pages import called, table
from trainer.cli.main import main

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
