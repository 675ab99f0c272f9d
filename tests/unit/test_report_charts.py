"""The drawings of the report: where values stand, what is written beside them."""

import json
import math
import re
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainer.report.charts import MOST_POINTS, Scale, Series, line_chart, scale_of
from trainer.report.figures import evaluation_charts, share_chart, training_charts
from trainer.report.wording import large, metric_text, metric_title, number, percent, ranks, tick


def hover(chart: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(chart.hover)
    return found


def test_line_goes_through_its_values() -> None:
    chart = line_chart("loss", [Series("loss", [0, 5, 10], [0.0, 1.0, 2.0])], floor=0.0)
    (line,) = re.findall(r'class="line c1" d="M([^"]+)"', chart.svg)
    (x0, y0), (x1, y1), (x2, y2) = (map(float, place.split()) for place in line.split("L"))
    assert (x0, x1, x2) == (0, 500, 1000)
    assert y0 == 300
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert hover(chart)["texts"] == [["0", "1", "2"]]
    assert [label.text for label in chart.y_labels] == ["0", "1", "2"]


def test_line_is_broken_where_a_value_is_not_finite() -> None:
    chart = line_chart("loss", [Series("loss", [1, 2, 3, 4], [1.0, math.nan, 2.0, 3.0])])
    assert chart.svg.count('class="line') == 2
    assert hover(chart)["texts"] == [["1", "not finite", "2", "3"]]
    assert hover(chart)["y"][0][1] is None


def test_long_line_is_drawn_through_means_with_a_band_of_its_extremes() -> None:
    values = [float(step % 2) for step in range(100 * MOST_POINTS)]
    chart = line_chart("loss", [Series("loss", range(len(values)), values)])
    assert len(hover(chart)["x"]) == MOST_POINTS
    assert hover(chart)["head"][0] == "steps 0-99"
    assert set(hover(chart)["texts"][0]) == {"0.5 (0 to 1)"}
    assert chart.svg.count('class="band') == 1


def test_axis_is_logarithmic_where_values_span_much_and_none_is_zero() -> None:
    wide = [Series("norm", [1, 2, 3], [0.01, 1.0, 100.0])]
    assert line_chart("norm", wide, may_be_log=True).note == "logarithmic"
    assert line_chart("norm", wide).note == ""
    assert line_chart("norm", [Series("norm", [1, 2], [0.0, 100.0])], may_be_log=True).note == ""


def test_shares_stand_on_one_another_as_wide_as_the_steps_they_cover() -> None:
    parts = [Series("compute", [1, 10], [1.0, 3.0], 1), Series("data", [1, 10], [3.0, 1.0], 2)]
    chart = share_chart("time", parts)
    compute, data = re.findall(r'class="area c\d" d="([^"]+)"', chart.svg)
    assert compute == "M0 300V225H100V75H1000V300H100V300H0Z"
    assert data == "M0 300V0H100V0H1000V75H100V225H0Z"
    assert hover(chart)["head"] == ["step 1", "steps 2-10"]
    assert hover(chart)["texts"] == [["25.0 %, 1.0 s", "75.0 %, 3.0 s"], ["75.0 %, 3.0 s", "25.0 %, 1.0 s"]]


def test_no_record_makes_no_chart_and_a_field_that_is_missing_none_of_its_own() -> None:
    assert training_charts([]) == []
    assert [chart.title for chart in training_charts([{"step": 1, "loss": 1.0}])] == ["Loss"]
    assert len(hover(training_charts([{"step": 1, "loss": math.nan}])[0])["x"]) == 1


def test_metrics_that_belong_together_share_a_chart_and_constant_counts_have_none() -> None:
    metrics = [
        "zero_shot_top5",
        "zero_shot_top1",
        *(f"retrieval_{way}_r{k}" for way in ("i2t", "t2i") for k in (10, 1, 5)),
    ]
    medians = {"retrieval_i2t_median_rank": 3.0, "retrieval_t2i_median_rank": 4.5}
    first = {"step": 1, "zero_shot_samples": 355, **dict.fromkeys(metrics, 0.25), **medians}
    found = evaluation_charts(
        [first, {**first, "step": 2, "retrieval_i2t_median_rank": 2.0, "retrieval_t2i_median_rank": 2.0}]
    )
    assert {chart.title: hover(chart)["names"] for chart in found} == {
        "zero-shot": ["top-1", "top-5"],
        "retrieval image to text": ["R@1", "R@5", "R@10"],
        "retrieval text to image": ["R@1", "R@5", "R@10"],
        "retrieval median rank": ["image to text", "text to image"],
    }


def test_a_median_rank_of_1_is_no_share() -> None:
    found = [{"step": 1, "retrieval_i2t_median_rank": 1.0, "retrieval_i2t_r1": 1.0}]
    assert metric_text("retrieval_i2t_median_rank", 1.0, found) == "1"
    assert metric_text("retrieval_i2t_r1", 1.0, found) == "100.0 %"


def test_one_evaluation_makes_no_chart() -> None:
    assert evaluation_charts([{"step": 1, "zero_shot_top1": 0.5}]) == []


def test_unknown_metrics_keep_their_name() -> None:
    assert metric_title("my_own_score") == "my own score"


finite = st.floats(-1e12, 1e12).map(lambda value: float(f"{value:.9g}"))


@given(st.lists(finite, max_size=8), st.booleans(), st.sampled_from([None, 0.0]))
@example([5e-324], False, None)
@example([1.0, 1.0000000000000002], False, None)
@example([1e-310, 1e-305], True, None)
def test_scale_holds_all_values_and_its_labels_lie_on_it_in_order(
    values: list[float], may_be_log: bool, floor: float | None
) -> None:
    scale = scale_of(values, floor=floor, may_be_log=may_be_log)
    assert all(scale.low <= value <= scale.high for value in values)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 7
    assert ticks == sorted(set(ticks))
    assert all(0 <= scale.place(value) <= 1 for value in [*ticks, *values])


@given(st.floats(1e-12, 1e12), st.floats(60, 1e20))
def test_logarithmic_scale_has_labels(low: float, ratio: float) -> None:
    assert 1 <= len(Scale(low, low * ratio, log=True).ticks()) <= 6


def test_the_largest_numbers_have_an_axis() -> None:
    scale = scale_of([-1.7e308, 1.7e308])
    assert (scale.place(-1.7e308), scale.place(1.7e308)) == pytest.approx((0, 1), abs=0.1)
    assert len(scale.ticks()) > 1


def test_axis_labels_are_round() -> None:
    assert scale_of([0.13, 0.88]).ticks() == [0.25, 0.5, 0.75]
    assert Scale(0.5, 40, log=True).ticks() == [1, 3, 10, 30]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (33792, "33,792"),
        (2.02636, "2.026"),
        (8.39e-07, "8.39e-07"),
        (12345.6, "12,346"),
        (0, "0"),
        (math.nan, "not finite"),
    ],
)
def test_numbers_have_what_people_read(value: float, text: str) -> None:
    assert number(value) == text


def test_words_for_shares_sizes_and_ranks() -> None:
    assert [percent(0.98309), large(10_240_000), large(3), large(math.inf)] == [
        "98.3 %",
        "10.24 M",
        "3",
        "not finite",
    ]
    assert [tick(value) for value in (0, 0.5, 5000, 2.5e6, 5e-4)] == ["0", "0.5", "5k", "2.5M", "5e-4"]
    assert [ranks([3]), ranks([3, 0, 1, 7, 2])] == ["rank 3", "ranks 0-3, 7"]


def test_a_single_value_is_a_dot_that_can_be_seen() -> None:
    """Runs that are evaluated once, and the runs of short sweeps, have charts of nothing else."""
    one = line_chart("top-1", [Series("a", [20], [0.5]), Series("b", [10, 20], [0.5, 0.6], 2)])
    assert re.findall(r'class="([a-z ]*line[a-z ]*) c\d"', one.svg) == ["line dot", "line"]
    css = files("trainer.report").joinpath("page.css").read_text()
    widths = [float(width) for width in re.findall(r"\.line\.dot \{ stroke-width: (\d+)", css)]
    assert min(widths) >= 6
