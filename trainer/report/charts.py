"""Draws charts of values over steps, with their axes, as SVG text. Pure; no torch.

The drawing is stretched to the width of the page; its labels are HTML beside it, placed in percent of its
size, so that they keep their own size.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainer.report.wording import number, percent, tick

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_LOG_RATIO = 50.0
_EQUAL = 1e-10
"""Relative difference below which two values count as one: labels have twelve digits."""
_NOTHING, _MOST = 1e-300, 1e300
"""Smallest and largest number that is scaled: less has too few digits to be divided, more leaves no room for
a margin.
"""


@dataclass(frozen=True)
class Scale:
    """Scale from `low` to `high`, which differ; both are above 0 if `log`."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Returns the place of a value, from 0 at the low end to 1 at the high end.

        Values outside are at the nearer end.
        """
        low, high, at = (
            (math.log10(max(v, 1e-300)) for v in (self.low, self.high, value))
            if self.log
            else (self.low, self.high, value)
        )
        return min(1.0, max(0.0, (at - low) / (high - low)))

    def ticks(self, about: int = 4) -> list[float]:
        """Returns round values from `low` to `high`."""
        return (
            _decades(self.low, self.high, about + 1)
            if self.log
            else _round_values(self.low, self.high, about)
        )


def scale_of(values: Iterable[float], *, floor: float | None = None, may_be_log: bool = False) -> Scale:
    """Returns a scale that holds all finite values with a margin.

    `floor` is its low end if no value is below it.
    """
    finite = [max(-_MOST, min(_MOST, value)) for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if may_be_log and low > _NOTHING and high > _LOG_RATIO * low:
        return Scale(low / 1.2, high * 1.2, log=True)
    if floor is not None and low >= floor:
        low = floor
    largest = max(abs(low), abs(high))
    span = high - low if high - low > _EQUAL * largest else largest
    air = 0.06 * (span if span > _NOTHING else 1.0)
    return Scale(low if low == floor else low - air, high + air)


def _round_values(low: float, high: float, about: int) -> list[float]:
    raw = (high - low) / about
    size = 10 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in _STEPS if factor * size >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{place * step:.12g}") for place in range(first, math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float, most: int) -> list[float]:
    """Returns 1, 2 and 5 times the powers of ten if these are not too many, else every so many powers."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = _within(
            (float(f"{digit}e{exponent}") for exponent in exponents for digit in digits), low, high
        )
        if len(ticks) <= most:
            return ticks
    powers = _within((float(f"1e{exponent}") for exponent in exponents), low, high)
    return powers[:: math.ceil(len(powers) / most)]


def _within(values: Iterable[float], low: float, high: float) -> list[float]:
    return [value for value in values if low <= value <= high]


WIDTH, HEIGHT = 1000, 300
MOST_POINTS = 300
"""Largest number of points of a line.

A longer line is drawn through the means of this many stretches, with a band from the least to the largest
value.
"""


@dataclass(frozen=True)
class Series:
    """One line: values over steps, both in the order of the steps."""

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    color: int = 1
    """Number of the page's colour."""


@dataclass(frozen=True)
class Label:
    """A text beside an axis; `place` is in percent from the left or the top."""

    place: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart as the page's template draws it."""

    title: str
    note: str
    svg: str
    x_labels: Sequence[Label]
    y_labels: Sequence[Label]
    legend: Sequence[tuple[str, int]]
    """Name and colour of each series; empty if there is only one."""
    hover: str
    """JSON: `x` (percent) and `head` of each point; `names` and `colors` by series; `texts` and `y` (percent)
    of each point by series, null where a series has no value.
    """
    x_title: str = "step"
    """Name of the lower axis."""
    y_title: str = ""
    """Name of the left axis, with its unit."""


@dataclass(frozen=True)
class _Point:
    """One value, or the mean of a stretch of values."""

    first: float
    step: float
    value: float
    least: float
    largest: float


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    text: Callable[[float], str] = number,
    label: Callable[[float], str] = tick,
    floor: float | None = None,
    may_be_log: bool = False,
    note: str = "",
    x_title: str = "step",
    y_title: str = "",
) -> Chart:
    """Returns a chart with one line per series; the series may have steps of their own.

    `text` formats a value, `label` a value beside the axis; see `scale_of` for the rest. With an `x_title`,
    the `steps` of the series count that.
    """
    x = step_scale(max((line.steps[-1] for line in series if line.steps), default=1))
    y = scale_of((value for line in series for value in line.values), floor=floor, may_be_log=may_be_log)
    drawn = [(line, _thinned(line)) for line in series]
    svg = "".join(_line(line.color, points, x, y) for line, points in drawn)
    return Chart(
        title=title,
        note=", ".join(part for part in (note, "logarithmic" if y.log else "") if part),
        svg=grid(y) + svg,
        x_labels=step_labels(x),
        y_labels=[Label(100 - 100 * y.place(at), label(at)) for at in y.ticks()],
        legend=[(line.name, line.color) for line in series] if len(series) > 1 else [],
        hover=_hover(drawn, x, y, text, x_title),
        x_title=x_title,
        y_title=y_title,
    )


def step_scale(last: float, first: float = 0.0) -> Scale:
    """Returns the scale from the first to the last step, without a margin."""
    return Scale(first, max(last, first + 1))


def step_labels(x: Scale) -> list[Label]:
    """Returns the labels along the lower edge, whole steps only."""
    return [Label(100 * x.place(step), tick(step)) for step in x.ticks() if step == int(step)]


def grid(y: Scale) -> str:
    """Returns the SVG of a line across for each label of the axis."""
    return "".join(f'<path class="grid" d="M0 {height(y, at)}H{WIDTH}"/>' for at in y.ticks())


def height(y: Scale, value: float) -> float:
    """Returns the distance from the top of the drawing, in its units."""
    return round(HEIGHT * (1 - y.place(value)), 1)


def width(x: Scale, step: float) -> float:
    """Returns the distance from the left of the drawing, in its units."""
    return round(WIDTH * x.place(step), 1)


def stretches(length: int) -> list[slice]:
    """Returns at most MOST_POINTS slices of about the same length that together cover `length` points."""
    count = min(length, MOST_POINTS)
    edges = [length * place // count for place in range(count + 1)] if count else [0]
    return [slice(first, end) for first, end in pairwise(edges)]


def _thinned(line: Series) -> list[_Point]:
    points = []
    for some in stretches(len(line.steps)):
        steps, values = line.steps[some], [value for value in line.values[some] if math.isfinite(value)]
        mean = sum(values) / len(values) if values else math.nan
        points.append(
            _Point(steps[0], steps[-1], mean, min(values, default=math.nan), max(values, default=math.nan))
        )
    return points


def _line(color: int, points: Sequence[_Point], x: Scale, y: Scale) -> str:
    """Returns the SVG of a line through the means, broken where a value is not finite, and of its band.

    A single point is a dot.
    """
    svg = []
    for part in _unbroken(points):
        places = [(width(x, point.step), height(y, point.value)) for point in part]
        band = [(width(x, point.step), height(y, point.largest)) for point in part]
        band += [(width(x, point.step), height(y, point.least)) for point in reversed(part)]
        if any(point.least != point.largest for point in part):
            svg.append(f'<path class="band c{color}" d="{_path(band)}Z"/>')
        # A line of no length is a dot, since its ends are round: as large as its stroke is wide.
        shown, kind = (places, "line") if len(places) > 1 else (places * 2, "line dot")
        svg.append(f'<path class="{kind} c{color}" d="{_path(shown)}"/>')
    return "".join(svg)


def _unbroken(points: Sequence[_Point]) -> list[list[_Point]]:
    parts: list[list[_Point]] = [[]]
    for point in points:
        if math.isfinite(point.value):
            parts[-1].append(point)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{left:g} {top:g}" for left, top in places)


def _hover(
    drawn: Sequence[tuple[Series, Sequence[_Point]]],
    x: Scale,
    y: Scale,
    text: Callable[[float], str],
    x_title: str,
) -> str:
    """Returns the texts for hovering; at a place where a line has no point, they are those of its nearest."""
    places = _places([points for _, points in drawn])
    lines = [[_nearest(points, place) for place in places] for _, points in drawn]
    return json.dumps(
        {
            "x": [round(100 * x.place(place.step), 2) for place in places],
            "head": [steps_text(place.first, place.step, x_title) for place in places],
            "names": [line.name for line, _ in drawn],
            "colors": [line.color for line, _ in drawn],
            "texts": [[_value_text(point, text) if point else None for point in line] for line in lines],
            "y": [
                [
                    round(100 - 100 * y.place(point.value), 2)
                    if point and math.isfinite(point.value)
                    else None
                    for point in line
                ]
                for line in lines
            ],
        }
    )


def _places(lines: Sequence[Sequence[_Point]]) -> list[_Point]:
    """Returns the points of the first line, and of the others those that lie at no place of it.

    There are at most MOST_POINTS of them.
    """
    places = {point.step: point for points in reversed(lines) for point in points}
    ordered = [places[step] for step in sorted(places)]
    return [ordered[some.stop - 1] for some in stretches(len(ordered))]


def _nearest(points: Sequence[_Point], place: _Point) -> _Point | None:
    """Returns the point of a line that is nearest to a place; None beyond the line's ends."""
    if not points or not points[0].first <= place.step or not place.first <= points[-1].step:
        return None
    after = bisect_left(points, place.step, key=lambda point: point.step)
    near = points[max(0, after - 1) : after + 1]
    return min(near, key=lambda point: abs(point.step - place.step))


def _value_text(point: _Point, text: Callable[[float], str]) -> str:
    if point.first == point.step or not math.isfinite(point.value):
        return text(point.value)
    return f"{text(point.value)} ({text(point.least)} to {text(point.largest)})"


def steps_text(first: float, last: float, unit: str = "step") -> str:
    """Returns `step 20`, or `steps 1-20`; a unit other than "step" is a plural, as in `20 samples`."""
    if unit != "step":
        return f"{last:,.0f} {unit}"
    return f"step {last:,.0f}" if first == last else f"steps {first:,.0f}-{last:,.0f}"


@dataclass(frozen=True)
class Stack:
    """Amounts of the parts of a whole, which stand on one another from `left` to `right`."""

    head: str
    """Text about the stack, for hovering."""
    left: float
    right: float
    amounts: Sequence[float]

    def below(self, part: int) -> float:
        """Returns the share of all parts before this one."""
        return sum(self.amounts[:part]) / (sum(self.amounts) or 1.0)


def stacked_chart(
    title: str,
    parts: Sequence[tuple[str, int]],
    stacks: Sequence[Stack],
    x: Scale,
    text: Callable[[float], str],
    x_labels: Sequence[Label],
    *,
    least: float = 0.0,
    edges: str = "",
    note: str = "",
    x_title: str = "step",
    y_title: str = "",
) -> Chart:
    """Returns a chart of the shares of parts, each given by name and colour, over what `x` counts.

    `text` formats an amount. A part that has a smaller share than `least` in every stack is left out. `edges`
    is SVG above the areas.
    """
    y = Scale(0.0, 1.0)
    shares = [[stack.below(at + 1) - stack.below(at) for stack in stacks] for at in range(len(parts))]
    shown = [at for at in range(len(parts)) if max(shares[at], default=0.0) >= least]
    areas = (
        f'<path class="area c{parts[at][1]}" d="{_stairs(stacks, at, x, y)}"/>' for at in shown if stacks
    )
    hover = {
        "x": [round(100 * x.place((stack.left + stack.right) / 2), 2) for stack in stacks],
        "head": [stack.head for stack in stacks],
        "names": [parts[at][0] for at in shown],
        "colors": [parts[at][1] for at in shown],
        "texts": [
            [
                f"{percent(share)}, {text(stack.amounts[at])}"
                for share, stack in zip(shares[at], stacks, strict=True)
            ]
            for at in shown
        ],
        "y": [],
    }
    return Chart(
        title=title,
        note=note,
        svg="".join(areas) + grid(y) + edges,
        x_labels=x_labels,
        y_labels=[Label(100 - 100 * share, f"{share:.0%}") for share in y.ticks()],
        legend=[parts[at] for at in shown],
        hover=json.dumps(hover),
        x_title=x_title,
        y_title=y_title,
    )


def _stairs(stacks: Sequence[Stack], part: int, x: Scale, y: Scale) -> str:
    """Returns an SVG path along the part's upper edge and back along its lower one."""
    there = [f"V{height(y, stack.below(part + 1)):g}H{width(x, stack.right):g}" for stack in stacks]
    back = [f"V{height(y, stack.below(part)):g}H{width(x, stack.left):g}" for stack in reversed(stacks)]
    return f"M{width(x, stacks[0].left):g} {height(y, 0.0):g}" + "".join(there + back) + "Z"
