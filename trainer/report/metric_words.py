"""Names and values of an evaluation's metrics in words. Imports no pydantic."""

import math
import re
from collections.abc import Sequence

from trainer.report.folder import Numbers
from trainer.report.wording import number, percent

_LOOKED_FOR = {"zero_shot_top1": "top-1", "retrieval_i2t_r1": "i2t R@1", "retrieval_t2i_r1": "t2i R@1"}
"""Metrics that people look for first, with short titles."""


def shown_metrics(values: Numbers, *, wide: bool = False) -> dict[str, str]:
    """Returns the texts of an evaluation's metrics by name: of those that people look for, or all if `wide`.

    An evaluation that has none of these shows all.
    """
    measured = [name for name in values if name not in ("step", "generation")]
    names = measured if wide else [name for name in _LOOKED_FOR if name in values] or measured
    return {name: metric_text(name, values[name], [values]) for name in names}


def short_title(name: str) -> str:
    """Returns a title for a column of a table."""
    return _LOOKED_FOR.get(name) or metric_title(name)


def metric_names(evaluations: Sequence[Numbers]) -> list[str]:
    """Returns the metrics' names in the order of their first appearance."""
    return list(dict.fromkeys(name for event in evaluations for name in event if name != "step"))


def is_share(name: str, evaluations: Sequence[Numbers]) -> bool:
    """Returns whether a metric is a share, such as an accuracy or a recall.

    Those are floats from 0 to 1, and counts are integers; a median rank is a float too.
    """
    if name.endswith("_rank"):
        return False
    values = [event[name] for event in evaluations if name in event and math.isfinite(event[name])]
    return any(isinstance(value, float) for value in values) and all(0 <= value <= 1 for value in values)


def metric_text(name: str, value: float, evaluations: Sequence[Numbers]) -> str:
    """Returns the text of a value: shares in percent, others as they are."""
    return percent(value) if is_share(name, evaluations) else number(value)


def metric_title(name: str) -> str:
    """Returns a readable title: `retrieval_i2t_r5` becomes `retrieval image to text R@5`."""
    title = (
        re.sub(r"^ema_", "EMA ", re.sub(r"^mix_", "mixture ", name))
        .replace("zero_shot", "zero-shot")
        .replace("i2t", "image to text")
        .replace("t2i", "text to image")
        .replace("_", " ")
    )
    return re.sub(r"\btop(\d+)$", r"top-\1", re.sub(r"\br(\d+)$", r"R@\1", title))
