"""The page about a sweep, on run folders as ranks leave them."""

import json
from pathlib import Path

import pytest

from tests.support.report_folders import failed_run, long_run
from tests.support.report_pages import table
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
