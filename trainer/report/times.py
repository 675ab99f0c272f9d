"""Draws where the time of a run went, and lists its restarts. Pure; no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from trainer.report.charts import (
    HEIGHT,
    Chart,
    Label,
    Scale,
    Stack,
    stacked_chart,
    step_scale,
    stretches,
    width,
)
from trainer.report.folder import RunFacts
from trainer.report.wording import number, percent, span
from trainer.run.exit_record import rank_name
from trainer.supervise.coordinate.membership import exclusions_text
from trainer.supervise.restarts import parts_text
from trainer.telemetry.goodput import CAUSES, GenerationTimes, Goodput, by_generation
from trainer.text.wording import many

USEFUL = "useful"
CAUSE_COLORS = {
    USEFUL: 2,
    "start": 1,
    "data": 7,
    "checkpoint": 4,
    "evaluation": 8,
    "stragglers": 9,
    "detection": 10,
    "recovery": 3,
    "redone": 5,
    "other": 6,
}
"""Number of the page's colour of each part of the time, in the order in which they are drawn."""
_LEAST = 0.0005
"""Share of the time below which a part has no place in a legend."""
_RESTARTS = 100
_MARKS = 100
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


@dataclass(frozen=True)
class RestartRow:
    """One restart of the ranks as the report's table shows it."""

    generation: str
    began: str
    """Time since the run began, without the time between starts."""
    who: str
    cause: str
    step: str
    from_step: str
    seconds: str
    parts: str
    ranks: str
    """Number of ranks from this restart on."""


def time_charts(all_times: Sequence[GenerationTimes]) -> list[Chart]:
    """Returns a bar of the run's time by cause, and with several generations one column for each of them."""
    times = by_generation(all_times)
    whole = sum(times, Goodput())
    if whole.whole_s <= 0:
        return []
    return [_bar(whole), *([_columns(all_times, times)] if len(times) > 1 else [])]


def restart_steps(all_times: Sequence[GenerationTimes], *, stages: bool = False) -> list[int]:
    """Returns the steps from which ranks went on after they had begun again, in this start or a new one.

    With `stages`, those after which they began a later stage of their run.
    """
    began = (its for its in all_times[1:] if its.ready is not None and its.next_stage == stages)
    return sorted({its.from_step for its in began})[:_MARKS]


def marked(charts: Sequence[Chart], last: float, steps: Sequence[int]) -> list[Chart]:
    """Returns the charts with a dashed line at each of these steps; `last` is their last step."""
    x = step_scale(last)
    lines = "".join(f'<path class="mark" d="M{width(x, step):g} 0V{HEIGHT}"/>' for step in steps)
    return [replace(chart, svg=chart.svg + lines) for chart in charts]


def restart_rows(facts: RunFacts) -> list[RestartRow]:
    """Returns the last _RESTARTS restarts within the starts of the run, in their order.

    As long as goodput.jsonl has none, they are those of the last start.
    """
    ends = [0.0, *accumulate(its.whole_s for its in by_generation(facts.times))]
    known = [_row(its.restart, span(at)) for its, at in zip(facts.times, ends, strict=False) if its.restart]
    return (known or [_row(restart, "") for restart in facts.restarts])[-_RESTARTS:]


def _row(restart: Mapping[str, Any], began: str) -> RestartRow:
    seconds, left_out = restart.get("seconds"), exclusions_text(restart.get("left_out"))
    return RestartRow(
        generation=_text(restart.get("generation")),
        began=began,
        who=rank_name(restart.get("rank", 0), restart.get("node", "")),
        cause=_text(restart.get("cause")) + (f"; left out: {', '.join(left_out)}" if left_out else ""),
        step=_text(restart.get("step")),
        from_step=_text(restart.get("from_step")),
        seconds=f"{seconds:g} s" if isinstance(seconds, int | float) else "none yet",
        parts=parts_text(restart.get("parts")),
        ranks=_text(restart.get("ranks") or None),
    )


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _parts(times: Goodput) -> dict[str, float]:
    """Returns seconds by part of the time, useful first; those of CAUSE_COLORS and in their order."""
    seconds = {USEFUL: times.useful_s, **times.lost_s}
    return {name: seconds.get(name, 0.0) for name in CAUSE_COLORS}


def _bar(whole: Goodput) -> Chart:
    """Returns one bar from left to right, cut by cause."""
    parts = {name: seconds for name, seconds in _parts(whole).items() if seconds >= _LEAST * whole.whole_s}
    x = Scale(0.0, sum(parts.values()))
    ends = list(accumulate(parts.values()))
    starts = [end - seconds for end, seconds in zip(ends, parts.values(), strict=True)]
    svg = "".join(
        f'<path class="area c{CAUSE_COLORS[name]}" d="M{width(x, start):g} 0H{width(x, end):g}V{HEIGHT}'
        f'H{width(x, start):g}Z"/>'
        for name, start, end in zip(parts, starts, ends, strict=True)
    )
    middles = [round(100 * x.place((start + end) / 2), 2) for start, end in zip(starts, ends, strict=True)]
    texts = [f"{percent(seconds / whole.whole_s)}, {span(seconds)}" for seconds in parts.values()]
    return Chart(
        title="Time of the run by cause",
        note=f"{span(whole.whole_s)} since it began, without the time between starts",
        svg=svg,
        x_labels=[Label(100 * share, f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)],
        y_labels=[],
        legend=[(f"{name} {text}", CAUSE_COLORS[name]) for name, text in zip(parts, texts, strict=True)],
        hover=json.dumps(
            {
                "x": middles,
                "head": [f"{name}: {CAUSES.get(name, 'steps that counted')}" for name in parts],
                "names": [""],
                "colors": [0],
                "texts": [texts],
                "y": [],
            }
        ),
        x_title="share of the time",
    )


def _columns(all_times: Sequence[GenerationTimes], times: Sequence[Goodput]) -> Chart:
    """Returns a column for each generation, as wide as its time and cut by cause."""
    columns = _stacked(all_times, times)
    x = Scale(0.0, columns[-1].right or 1.0)
    edges = "".join(
        f'<path class="mark" d="M{width(x, column.left):g} 0V{HEIGHT}"/>' for column in columns[1:]
    )
    return stacked_chart(
        "Time by cause, for each start and generation",
        list(CAUSE_COLORS.items()),
        columns,
        x,
        span,
        _time_labels(x),
        least=_LEAST,
        edges=edges,
        note="dashed: the ranks began again, or a stage",
        x_title="time since the run began",
        y_title="share of the time",
    )


def _stacked(all_times: Sequence[GenerationTimes], times: Sequence[Goodput]) -> list[Stack]:
    """Returns the seconds, by part, of each generation, or of several neighbours of a long list."""
    columns, left = [], 0.0
    for some in stretches(len(times)):
        whole = sum(times[some], Goodput())
        first, last = all_times[some][0], all_times[some][-1]
        of_steps = f"from step {number(first.from_step)} to {number(last.step)}"
        head = f"generation {first.number}" if first is last else many(len(times[some]), "generation")
        parts = list(_parts(whole).values())
        columns.append(Stack(f"{head}, {of_steps}", left, left + whole.whole_s, parts))
        left += whole.whole_s
    return columns


def _time_labels(x: Scale) -> list[Label]:
    """Returns round times along the lower edge, in the largest unit that the whole has at least twice."""
    size, unit = next((entry for entry in _UNITS if x.high >= 2 * entry[0]), _UNITS[-1])
    in_units = Scale(0.0, x.high / size)
    return [Label(100 * in_units.place(at), f"{at:g} {unit}") for at in in_units.ticks()]
