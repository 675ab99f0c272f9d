"""`clipship report RUN --watch`: the page is kept up to date until the run ends."""

import json
import time
from pathlib import Path

import pytest

from tests.support.report_folders import failed_run, long_run
from trainer.cli import main as cli
from trainer.report.folder import read_run
from trainer.report.page import page
from trainer.report.watch import EVERY_S, watch

PAGE = Path("report.html")


def test_page_is_written_until_the_run_ends_and_once_more() -> None:
    written: list[float | None] = []
    waits: list[float] = []
    states = iter([True, True, False])

    def write(reload_s: float | None) -> Path:
        written.append(reload_s)
        return PAGE

    assert watch(write, lambda: next(states), waits.append) == PAGE
    assert written == [EVERY_S, EVERY_S, None]
    assert waits == [EVERY_S, EVERY_S]


def test_interrupt_leaves_a_page_that_loads_itself_no_more() -> None:
    written: list[float | None] = []

    def write(reload_s: float | None) -> Path:
        written.append(reload_s)
        return PAGE

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(write, lambda: True, interrupt)
    assert written == [EVERY_S, None]


def test_only_the_page_of_a_run_that_goes_on_loads_itself_again(tmp_path: Path) -> None:
    facts = read_run(long_run(tmp_path / "run", finished=False))
    live, still = page(facts, 5.0), page(facts)
    assert 'data-reload="5.0"' in live
    assert "location.reload" in live
    assert "data-reload" not in still
    assert "location.reload" not in still


def test_command_ends_with_the_last_of_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = long_run(tmp_path / "one"), failed_run(tmp_path / "two")
    assert cli.main(["report", str(one), str(two), "--watch"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'comparison.html'}\n"
    assert "kept up to date until the run ends" in printed.err
    assert "data-reload" not in (tmp_path / "comparison.html").read_text()


def test_a_run_that_waits_in_a_queue_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "queued"
    submitted = {"to": "slurm", "id": "7", "at": "2026-01-01T00:00:00+00:00", "details": {}}
    (folder / "artefacts").mkdir(parents=True)
    (folder / "artefacts" / "submission.json").write_text(json.dumps(submitted))
    waits: list[float] = []

    def start(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            failed_run(folder)

    monkeypatch.setattr(time, "sleep", start)
    assert cli.main(["report", str(folder)]) == 2, "there is nothing to show"
    assert "has no job.toml" in capsys.readouterr().err
    assert cli.main(["report", str(folder), "--watch"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{folder / 'report.html'}\n"
    assert f"no rank has started yet: {folder}." in printed.err
    assert waits == [EVERY_S, EVERY_S]


def test_a_folder_that_is_no_run_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    assert cli.main(["report", str(tmp_path / "other"), "--watch"]) == 2
    assert "is not a run: " in capsys.readouterr().err
