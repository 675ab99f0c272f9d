"""`clipship report RUN1 RUN2 ...`: curves over each other, and what differs."""

import json
from pathlib import Path

import pytest

from tests.support.report_folders import failed_run, long_run
from tests.support.report_pages import LOSS, called, charts, shown, table, written
from trainer.cli.main import main

HOSTILE = '<script>alert("1")</script>'


def test_lines_with_steps_of_their_own_have_the_values_nearest_to_the_pointer(tmp_path: Path) -> None:
    told = {"a": {1: 1.0, 10: 2.0, 20: 3.0}, "b": {1: 5.0, 8: 6.0}}
    runs = [
        written(tmp_path / name, *({"step": step, "loss": loss} for step, loss in losses.items()))
        for name, losses in told.items()
    ]
    points = charts(shown(*runs))["Loss"].hover
    assert points["head"] == ["step 1", "step 8", "step 10", "step 20"]
    assert points["texts"] == [["1", "2", "2", "3"], ["5", "6", None, None]]
    assert points["y"][1][2:] == [None, None]


def test_many_long_lines_have_no_more_points_than_one(tmp_path: Path) -> None:
    runs = [
        written(tmp_path / str(n), *({"step": step, "loss": 1.0} for step in range(n, 5000, 7)))
        for n in (1, 2, 3)
    ]
    points = charts(shown(*runs))["Loss"].hover
    assert len(points["x"]) == 300
    assert points["x"] == sorted(points["x"])
    assert [len(texts) for texts in points["texts"]] == [300] * 3


def test_page_has_a_curve_of_each_run_and_the_keys_that_differ(tmp_path: Path) -> None:
    one, two = long_run(tmp_path / "one"), long_run(tmp_path / "two", steps=1200)
    page = shown(one, two)
    assert "2 runs compared" in page
    assert page.count('class="line c2"') > 6
    assert "<h3>Job</h3>" in page
    assert table(page, "differences") == [["", "one", "two"], ["optim.steps", "2000", "1200"]]
    for absent in ("Loss over samples", "a-secret"):
        assert absent not in page
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
