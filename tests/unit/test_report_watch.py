"""`clipship report RUN --watch`: the page is kept up to date until the run ends."""

import json
import time
from pathlib import Path

import pytest

from tests.support.report_folders import failed_run, long_run
from tests.support.report_pages import shown
from trainer.cli.main import main

Capture = pytest.CaptureFixture[str]
EVERY_S = 5.0


@pytest.mark.parametrize("interrupted", [False, True])
def test_page_is_written_until_the_run_ends_and_loads_itself_again_until_then(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """Also where Ctrl-C ends the watch before the run does."""
    folder = long_run(tmp_path / "run", steps=100, every=50, finished=False)
    waits, pages = [], []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        pages.append((folder / "report.html").read_text())
        if len(waits) == 2 and interrupted:
            raise KeyboardInterrupt
        if len(waits) == 2:
            (folder / "result.json").write_text('{"reason": "done"}')

    monkeypatch.setattr(time, "sleep", wait)
    assert main(["report", str(folder), "--watch"]) == (130 if interrupted else 0)
    printed = capsys.readouterr()
    assert printed.out == f"{folder / 'report.html'}\n"
    assert "kept up to date until the run ends" in printed.err
    assert waits == [EVERY_S, EVERY_S]
    for page in pages:
        assert 'data-reload="5.0"' in page
        assert "location.reload" in page
    last = (folder / "report.html").read_text()
    assert "data-reload" not in last
    assert "location.reload" not in last
    assert last == shown(folder)


def test_a_run_that_waits_in_a_queue_is_waited_for(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
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
    assert main(["report", str(folder)]) == 2, "there is nothing to show"
    assert "has no job.toml" in capsys.readouterr().err
    assert main(["report", str(folder), "--watch"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{folder / 'report.html'}\n"
    assert f"no rank has started yet: {folder}." in printed.err
    assert waits == [EVERY_S, EVERY_S]
    (tmp_path / "other").mkdir()
    assert main(["report", str(tmp_path / "other"), "--watch"]) == 2, "a folder that is no run"
    assert "is not a run: " in capsys.readouterr().err
