"""`clipship report RUN1 RUN2 ...`: curves over each other, and what differs."""

import json
from pathlib import Path

import pytest

from tests.support.report_folders import failed_run, long_run
from tests.support.report_pages import LOSS, called, charts, shown, table, written
from trainer.cli.main import main

HOSTILE = '<script>alert("1")</script>'


def test_page_has_a_curve_of_each_run_and_the_keys_that_differ(tmp_path: Path) -> None:
    one, two = long_run(tmp_path / "one"), long_run(tmp_path / "two", steps=1200)
    page = shown(one, two)
    assert page.count('class="line c2"') > 6
    assert table(page, "differences") == [["", "one", "two"], ["optim.steps", "2000", "1200"]]
    assert "Loss over samples" not in page
    job = two / "job.toml"
    job.write_text(job.read_text().replace("512", "1024"))
    assert charts(shown(one, two))["Loss over samples"].hover["head"][-1] == "1,024,000 samples"


def test_empty_unfinished_and_equal_runs_are_compared_too(tmp_path: Path) -> None:
    one, two = written(tmp_path / "one"), long_run(tmp_path / "two", finished=False)
    (one / "job.toml").write_text("not [ toml")
    page = shown(one, two)
    assert "one: job.toml cannot be read" in page
    assert "not finished" in page
    page = shown(one, written(tmp_path / "three"))
    assert "No step has been logged yet." in page
    assert "Job, data and environment are equal." in page


def test_hostile_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    one = failed_run(tmp_path / "one", name=HOSTILE)
    two = long_run(tmp_path / f"two {HOSTILE.replace('/', '')}")
    (two / "environment.json").write_text(json.dumps([{"rank": "0", HOSTILE: HOSTILE}]))
    written(two, *({"step": step, HOSTILE: step / 1000} for step in (1, 2)))
    page = shown(one, two)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_command_writes_beside_the_first_run_and_tells_runs_of_one_name_apart(tmp_path: Path) -> None:
    runs = [written(tmp_path / name / "run", LOSS) for name in ("one", "two")]
    assert called("report", *map(str, runs)) == f"{tmp_path / 'one' / 'comparison.html'}\n"
    page = (tmp_path / "one" / "comparison.html").read_text()
    assert charts(page)["Loss"].legend == ["one/run", "two/run"]
    assert page == shown(*runs)


def test_too_many_runs_and_one_run_twice_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(written(tmp_path / str(number), LOSS)) for number in range(9)]
    for given, said in ((runs, "9 runs are too many for one page: give at most 8"), (
        [runs[0], f"{runs[0]}/."], "a run is named twice"
    )):  # fmt: skip
        assert main(["report", *given]) == 2
        assert said in capsys.readouterr().err
    assert called("report", *runs[1:])
