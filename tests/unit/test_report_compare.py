"""`clipship report RUN1 RUN2 ...`: curves over each other, and what differs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.report_folders import failed_run, long_run
from trainer.cli import main as cli
from trainer.errors import InputError
from trainer.report import compare
from trainer.report.charts import MOST_POINTS, Series, line_chart
from trainer.report.folder import read_run

HOSTILE = '<script>alert("1")</script>'


def hover(chart: Any) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(chart.hover)
    return read


def shown(*folders: Path) -> str:
    return compare.page([read_run(folder) for folder in folders])


def test_lines_with_steps_of_their_own_have_the_values_nearest_to_the_pointer() -> None:
    lines = [Series("a", [1, 10, 20], [1.0, 2.0, 3.0], 1), Series("b", [1, 8], [5.0, 6.0], 2)]
    points = hover(line_chart("loss", lines))
    assert points["head"] == ["step 1", "step 8", "step 10", "step 20"]
    assert points["texts"] == [["1", "2", "2", "3"], ["5", "6", None, None]]
    assert points["y"][1][2:] == [None, None]


def test_many_long_lines_have_no_more_points_than_one() -> None:
    lines = [Series(f"{n}", range(n, 5000, 7), [1.0] * len(range(n, 5000, 7)), n) for n in (1, 2, 3)]
    points = hover(line_chart("loss", lines))
    assert len(points["x"]) == MOST_POINTS
    assert points["x"] == sorted(points["x"])
    assert all(len(texts) == MOST_POINTS for texts in points["texts"])


def test_page_has_a_curve_of_each_run_and_the_keys_that_differ(tmp_path: Path) -> None:
    one, two = long_run(tmp_path / "one"), long_run(tmp_path / "two", steps=1200)
    text = shown(one, two)
    assert "2 runs compared" in text
    assert text.count('class="line c2"') > 6
    assert "<th>optim.steps</th><td>2000</td><td>1200</td>" in text
    assert "optim.loss" not in text
    assert "<h3>Job</h3>" in text
    assert "Job, data and environment are equal." in shown(one, one)
    assert "Loss over samples" not in text
    assert "a-secret" not in text


def test_runs_with_other_batches_are_compared_over_samples_too(tmp_path: Path) -> None:
    one, two = long_run(tmp_path / "one"), long_run(tmp_path / "two")
    job = two / "job.toml"
    job.write_text(job.read_text().replace("512", "1024"))
    assert "Loss over samples" in shown(one, two)


def test_hostile_text_of_a_run_is_escaped(tmp_path: Path) -> None:
    one = failed_run(tmp_path / "one", name=HOSTILE)
    two = long_run(tmp_path / f"two {HOSTILE.replace('/', '')}")
    (two / "environment.json").write_text(json.dumps([{"rank": "0", HOSTILE: HOSTILE}]))
    with open(two / "metrics.jsonl", "a") as metrics:
        metrics.write("".join(json.dumps({"step": step, HOSTILE: step / 1000}) + "\n" for step in (1, 2)))
    text = shown(one, two)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


def test_empty_and_unfinished_runs_are_compared_too(tmp_path: Path) -> None:
    one, two = tmp_path / "one", long_run(tmp_path / "two", finished=False)
    one.mkdir()
    (one / "job.toml").write_text("not [ toml")
    text = shown(one, two)
    assert "one: job.toml cannot be read" in text
    assert "not finished" in text
    assert "No step has been logged yet." in shown(one, one)


def test_runs_of_one_name_are_told_apart_by_the_folders_above() -> None:
    assert compare.run_names([Path("/a/x/run"), Path("/b/x/run")]) == ["a/x/run", "b/x/run"]
    assert compare.run_names([Path("/a/one"), Path("/a/two")]) == ["one", "two"]


def test_command_writes_beside_the_first_run_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(long_run(tmp_path / name)) for name in ("one", "two")]
    assert cli.main(["report", *runs]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'comparison.html'}\n"
    assert cli.main(["report", *runs, "--output", str(tmp_path / "o.html")]) == 0
    assert (tmp_path / "o.html").read_text() == (tmp_path / "comparison.html").read_text()


def test_too_many_runs_and_one_run_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="9 runs are too many for one page: give at most 8"):
        compare.write_comparison([tmp_path / str(number) for number in range(9)])
    with pytest.raises(InputError, match="a run is named twice"):
        compare.write_comparison([tmp_path, tmp_path / "." / ""])
