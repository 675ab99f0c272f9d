"""`clipship runs`, on run folders as ranks leave them."""

import json
from pathlib import Path

import pytest

from tests.support.report_folders import failed_run, long_run
from trainer.cli import main as cli
from trainer.launch.submission import Submission, record

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    long_run(tmp_path / "runs" / "first", steps=100, every=50)
    failed_run(tmp_path / "runs" / "second")
    return tmp_path / "runs"


def test_each_run_has_a_line(runs: Path, capsys: Capture) -> None:
    assert cli.main(["runs"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split() == ["run", "where", "state", "step", "samples/s", "left", "last"]
    assert {line.split()[0] for line in lines} == {"first", "second"}
    of = {line.split()[0]: line for line in lines}
    assert "  here  " in of["first"]
    assert "  done  " in of["first"]
    assert "  100/100  " in of["first"]
    assert "  failed (" in of["second"]


def test_a_scheduler_that_does_not_answer_costs_no_other_line(
    runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = runs / "waiting"
    (waiting / "artefacts").mkdir(parents=True)
    record(waiting, Submission("slurm", "12", "2026-01-01T00:00:00+00:00"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["runs", "--json"]) == 0
    found = {Path(run["run"]).name: run for run in json.loads(capsys.readouterr().out)["runs"]}
    assert found["waiting"]["where"] == "slurm 12"
    assert found["waiting"]["scheduler_state"].startswith("unknown: ")
    assert found["first"]["done"] is True
    assert found["second"]["end"]["exit_code"] != 0


def test_a_damaged_run_is_named_and_the_others_are_listed(runs: Path, capsys: Capture) -> None:
    (runs / "odd" / "artefacts").mkdir(parents=True)
    (runs / "odd" / "artefacts" / "submission.json").write_text("no json")
    assert cli.main(["runs", "runs"]) == 0
    out = capsys.readouterr().out
    assert "unreadable" in out
    assert "submit it again" in out
    assert "first" in out


def test_no_run_and_no_folder_are_told(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["runs"]) == 0
    assert capsys.readouterr().err == "no run in ./runs\n"
    assert cli.main(["runs", "elsewhere"]) == 2
    assert "elsewhere is not a folder" in capsys.readouterr().err
