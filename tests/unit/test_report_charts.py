"""The drawings of the report: where values stand, what is written beside them, and in which colours."""

import math
import re
from collections.abc import Sequence
from importlib.resources import files
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.report_pages import LOSS, Drawn, charts, shown, written
from trainer.report.charts import scale_of
from trainer.report.times import CAUSE_COLORS

CSS = files("trainer.report").joinpath("page.css").read_text()
POINTS = 300
RATE = "Learning rate"


def drawn(folder: Path, *lines: dict[str, Any]) -> dict[str, Drawn]:
    """Charts of a run with these lines of metrics.jsonl."""
    return charts(shown(written(folder / "run", *lines)))


def rates(folder: Path, **values: float) -> Drawn:
    """A chart whose axis begins at 0; the steps are those of the words such as s5."""
    lines = ({**LOSS, "step": int(step[1:]), "lr": value} for step, value in values.items())
    return drawn(folder, *lines)[RATE]


def test_line_goes_through_its_values(tmp_path: Path) -> None:
    chart = rates(tmp_path, s0=0.0, s5=1.0, s10=2.0)
    (line,) = re.findall(r'class="line c1" d="M([^"]+)"', chart.svg)
    (x0, y0), (x1, y1), (x2, y2) = (map(float, place.split()) for place in line.split("L"))
    assert (x0, x1, x2, y0) == (0, 500, 1000, 300)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert chart.y_labels == ["0", "1", "2"]


def test_line_is_broken_where_a_value_is_not_finite(tmp_path: Path) -> None:
    chart = rates(tmp_path, s1=1.0, s2=math.nan, s3=2.0, s4=3.0)
    assert chart.svg.count('class="line') == 2
    assert chart.hover["texts"] == [["1", "not finite", "2", "3"]]
    assert chart.hover["y"][0][1] is None


def test_long_line_is_drawn_through_means_with_a_band_of_its_extremes(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": step % 2} for step in range(10 * POINTS)]
    chart = drawn(tmp_path, *lines)["Loss"]
    assert len(chart.hover["x"]) == POINTS
    assert chart.hover["head"][0] == "steps 0-9"
    assert set(chart.hover["texts"][0]) == {"0.5 (0 to 1)"}
    assert chart.svg.count('class="band') == 1


def test_a_field_that_is_missing_has_no_chart(tmp_path: Path) -> None:
    found = drawn(tmp_path, {**LOSS, "loss": math.nan})
    assert list(found) == ["Loss"]
    assert len(found["Loss"].hover["x"]) == 1


finite = st.floats(-1e12, 1e12).map(lambda value: float(f"{value:.9g}"))


@given(st.lists(finite, max_size=8), st.booleans(), st.sampled_from([None, 0.0]))
@example([5e-324], False, None)
@example([1.0, 1.0000000000000002], False, None)
@example([1e-310, 1e-305], True, None)
@example([1e-12, 60e-12], True, None)
@example([1e-12, 1e20], True, None)
@example([3.0, 3e7], True, None)
def test_scale_holds_all_values_and_its_labels_lie_on_it_in_order(
    values: list[float], may_be_log: bool, floor: float | None
) -> None:
    scale = scale_of(values, floor=floor, may_be_log=may_be_log)
    assert all(scale.low <= value <= scale.high for value in values)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 7
    assert ticks == sorted(set(ticks))
    assert all(0 <= scale.place(value) <= 1 for value in [*ticks, *values])


def test_numbers_have_what_people_read(tmp_path: Path) -> None:
    values = (33792, 2.02636, 8.39e-07, 12345.6, 0, math.nan)
    chart = rates(tmp_path, **{f"s{step}": value for step, value in enumerate(values)})
    assert chart.hover["texts"] == [["33,792", "2.026", "8.39e-07", "12,346", "0", "not finite"]]
    for largest, label in ((1, "0.5"), (10_000, "5k"), (1e7, "5M"), (1e-3, "5e-4")):
        assert label in rates(tmp_path, s1=0.0, s2=largest).y_labels


SEEN: dict[str, Sequence[Sequence[float]]] = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)
    ),
}  # fmt: skip
"""Linear RGB as such an eye sees it: Machado, Oliveira and Fernandes 2009, severity 1."""
APART = 10
"""Least distance of two colours in CIELAB; about 2 is the least that people notice."""


def colors(scheme: str) -> dict[int, str]:
    """The page's colours by number, in the light or the dark scheme."""
    light, dark = CSS.split("@media (prefers-color-scheme: dark)")
    return {
        int(n): color for n, color in re.findall(r"--c(\d+): #(\w{6})", dark if scheme == "dark" else light)
    }


def lab(color: str, eye: str) -> tuple[float, float, float]:
    """CIELAB of a colour as that eye sees it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    r, g, b = (min(1.0, max(0.0, sum(f * v for f, v in zip(row, linear, strict=True)))) for row in SEEN[eye])
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("eye", SEEN)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_colour_blind_eye_tells_eight_runs_and_neighbours_in_the_time_of_a_run_apart(
    scheme: str, eye: str
) -> None:
    found = colors(scheme)
    assert sorted(found) == list(range(1, 11))
    pairs = {*combinations(range(1, 9), 2), *pairwise(CAUSE_COLORS.values())}
    distances = {pair: math.dist(*(lab(found[number], eye) for number in pair)) for pair in pairs}
    assert {pair: far for pair, far in distances.items() if far < APART} == {}
