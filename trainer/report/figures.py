"""Selects the charts for a run's metrics, and draws the parts of a step's time as shares. Pure; no torch."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from trainer.config.results import EMA, MIX
from trainer.report.charts import (
    Chart,
    Series,
    Stack,
    line_chart,
    stacked_chart,
    step_labels,
    step_scale,
    steps_text,
    stretches,
)
from trainer.report.folder import Numbers
from trainer.report.wording import is_share, metric_names, metric_title, percent, time_of

PARTS = (
    ("compute", "compute_s", 1),
    ("data", "data_s", 2),
    ("communication", "comm_s", 3),
    ("checkpoint", "checkpoint_s", 4),
)
"""Parts of a step's time: name, field of the record, colour."""

LINES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Loss", "loss", {"may_be_log": True, "y_title": "loss"}),
    ("Learning rate", "lr", {"floor": 0.0, "y_title": "learning rate"}),
    ("Throughput", "samples_per_s", {"floor": 0.0, "note": "all ranks", "y_title": "samples/s"}),
    ("Gradient norm", "grad_norm", {"may_be_log": True, "note": "before clipping", "y_title": "norm"}),
    ("Logit scale", "logit_scale", {"y_title": "scale"}),
)
"""Lines over the steps of training: title, field of the record, arguments of `line_chart`."""


def training_charts(records: Sequence[Numbers]) -> list[Chart]:
    """Returns the charts of the training loop's records; none without records."""
    charts = [
        line_chart(title, [series(records, name)], **settings)
        for title, name, settings in LINES
        if any(name in record for record in records)
    ]
    shares = [series(records, field, name, color) for name, field, color in PARTS]
    if any(any(map(math.isfinite, part.values)) for part in shares):
        parts = [
            Series(
                part.name,
                part.steps,
                [max(0.0, v) if math.isfinite(v) else 0.0 for v in part.values],
                part.color,
            )
            for part in shares
        ]
        charts.insert(3, share_chart("Step time", parts, note="rank 0"))
    return charts


def evaluation_charts(evaluations: Sequence[Numbers]) -> list[Chart]:
    """Returns a chart for each family of metrics, if there is more than one evaluation."""
    if len(evaluations) < 2:
        return []
    return [_metrics_chart(title, evaluations, names) for title, names in _families(evaluations)]


def series(
    events: Sequence[Numbers], name: str, title: str = "", color: int = 1, over: str = "step"
) -> Series:
    """Returns a field of all events over another one, their step; NaN if an event lacks the field."""
    return Series(
        title or name,
        [event[over] for event in events],
        [event.get(name, math.nan) for event in events],
        color,
    )


def _families(evaluations: Sequence[Numbers]) -> Iterator[tuple[str, list[str]]]:
    """Yields families of metrics, each with its title; each family is one chart.

    Shares whose names differ in their last word belong together, and so do the two directions of a retrieval
    metric, and those of the weights and of their moving average. Constant counts are left out.
    """
    names = [
        name
        for name in metric_names(evaluations)
        if is_share(name, evaluations) or _changes(name, evaluations)
    ]
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(_family(name, evaluations), []).append(name)
    for family, members in families.items():
        yield metric_title(family), members


def _family(name: str, evaluations: Sequence[Numbers]) -> str:
    plain = name.removeprefix(EMA).removeprefix(MIX)
    if is_share(name, evaluations):
        return plain.rpartition("_")[0] or plain
    return re.sub(r"_(i2t|t2i)(?=_)", "", plain)


def _changes(name: str, evaluations: Sequence[Numbers]) -> bool:
    return len({event[name] for event in evaluations if name in event}) > 1


def _metrics_chart(title: str, evaluations: Sequence[Numbers], names: Sequence[str]) -> Chart:
    order = sorted(
        names, key=lambda name: [int(part) if part.isdigit() else 0 for part in re.split(r"(\d+)", name)]
    )
    lines = [
        series(evaluations, name, _in_family(name, title), color)
        for color, name in enumerate(order[:6], start=1)
    ]
    return line_chart(title, lines, **metric_axis(names[0], evaluations))


def metric_axis(name: str, evaluations: Sequence[Numbers]) -> dict[str, Any]:
    """Returns the arguments of `line_chart` for a metric."""
    if is_share(name, evaluations):
        return {"text": percent, "label": percent_tick, "floor": 0.0, "y_title": "share"}
    return {"floor": 0.0, "y_title": "rank" if name.endswith("_rank") else "value"}


def _in_family(name: str, family: str) -> str:
    """Returns the words that tell a metric from the others of its family, such as `R@5`."""
    return " ".join(
        word for word in metric_title(name).split() if word not in family.split()
    ) or metric_title(name)


def percent_tick(share: float) -> str:
    """Returns a share in percent, such as `80%`."""
    return f"{100 * share:.3g}%"


def share_chart(title: str, parts: Sequence[Series], note: str = "") -> Chart:
    """Draws shares of a step's time over steps.

    Values are seconds of one step, averaged since the series' previous step; each block is as wide as these
    steps.
    """
    blocks = _blocks(parts)
    x = step_scale(blocks[-1].right if blocks else 1)
    names = [(part.name, part.color) for part in parts]
    y_title = "share of a step's time"
    return stacked_chart(title, names, blocks, x, time_of, step_labels(x), note=note, y_title=y_title)


def _blocks(parts: Sequence[Series]) -> list[Stack]:
    """Returns the seconds of one step, by part, of stretches of steps."""
    steps = parts[0].steps
    spans = [step - before for before, step in zip([0, *steps], steps, strict=False)]
    blocks = []
    for some in stretches(len(steps)):
        whole = sum(spans[some]) or 1
        seconds = [
            sum(span * value for span, value in zip(spans[some], part.values[some], strict=True)) / whole
            for part in parts
        ]
        left, right = steps[some][0] - spans[some][0], steps[some][-1]
        blocks.append(Stack(steps_text(left + 1, right), left, right, seconds))
    return blocks
