"""The report's bars of a suite are what `clipship eval --suite` wrote, whatever else the files hold."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.report_folders import long_run
from trainer.report.folder import read_run
from trainer.report.page import page
from trainer.report.suites import suite_bars

KEYS = ("names", "step", "ema", "sets", "missing", "name", "title", "metric", "value", "samples", "metrics")


def result(step: int = 300, **changes: Any) -> dict[str, Any]:
    pets = {
        "name": "vtab/pets", "title": "Oxford-IIIT Pet", "metric": "mean_per_class_recall",
        "metric_title": "mean per-class recall", "value": 0.75, "samples": 3669, "seconds": 1.0,
        "metrics": {"top1": 0.5, "mean_per_class_recall": 0.75},
    }  # fmt: skip
    broken = {"name": "cars", "title": "Stanford Cars", "error": "0.tar is damaged"}
    missing = [{"name": "vtab/dtd", "why": "there is no folder x", "source": "words"}]
    both = [pets, {**pets, "title": "<b>Other</b>", "value": 0.25}, broken]
    whole = {"names": ["vtab", "cars"], "step": step, "ema": False, "sets": both, "missing": missing}
    return {**whole, **changes}


def test_the_page_has_a_bar_for_each_set_and_the_reasons_of_the_others(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run")
    (folder / "evaluations").mkdir()
    (folder / "evaluations" / "vtab+cars-step-00000300.json").write_text(json.dumps(result()))
    (folder / "evaluations" / "half.json").write_text('{"names": [')
    text = page(read_run(folder))
    assert "Suite vtab, cars <small>step 300</small>" in text
    assert "half.json cannot be read" in text
    row = re.search(r'<tr title="([^"]*)"><th>Oxford-IIIT Pet</th>(.*)</tr>', text)
    assert row is not None
    assert row[1] == "top1 50.0 %, mean_per_class_recall 75.0 %"
    assert "<td>mean per-class recall</td><td>75.0 %</td>" in row[2]
    assert 'd="M0 0H75.00V10H0Z"' in row[2]
    assert "<td>3,669</td>" in row[2]
    assert "&lt;b&gt;Other&lt;/b&gt;" in text
    assert "<th>mean of 2</th><td></td><td>50.0 %</td>" in text
    assert "Not measured (2)" in text
    assert "<tr><th>cars</th><td>0.tar is damaged</td></tr>" in text
    assert "<tr><th>vtab/dtd</th><td>there is no folder x</td></tr>" in text


def test_a_run_without_a_suite_has_no_section_of_it(tmp_path: Path) -> None:
    assert "<h2>Suite" not in page(read_run(long_run(tmp_path / "run")))


def test_each_suite_is_shown_at_its_newest_step_and_the_average_beside() -> None:
    files = [result(900), result(300), result(600, ema=True), result(100, names=["imagenet"])]
    shown = [(suite.names, suite.step, suite.ema) for suite in suite_bars(files)]
    assert shown == [("imagenet", 100, False), ("vtab, cars", 900, False), ("vtab, cars", 600, True)]


@pytest.mark.parametrize("value", [None, "0.5", True, float("nan"), 1.5, -0.1, [0.5], 10**400])
def test_what_is_no_share_gets_no_bar(value: Any) -> None:
    assert suite_bars([result(sets=[{"name": "a", "value": value}])]) == []


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
)


@given(st.lists(st.dictionaries(st.sampled_from(KEYS), junk), max_size=3), junk)
def test_no_content_of_a_file_is_an_error(files: list[dict[str, Any]], inner: Any) -> None:
    bars = suite_bars([*files, result(sets=[inner]), result(missing=[inner]), result(names=inner)])
    assert all(0 <= bar.share <= 1 for suite in bars for bar in suite.sets)
