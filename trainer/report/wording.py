"""Formats numbers, lists of ranks, and names and values of metrics for people. Pure; no torch."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from trainer.text.wording import duration, runs_text


def number(value: float) -> str:
    """Returns four significant digits, and whole numbers in full.

    Examples are `33,792`, `2.026`, `8.39e-07` and `not finite`.
    """
    if not math.isfinite(value):
        return "not finite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.2e}"


def large(value: float) -> str:
    """Returns the text of `number` up to a million; from there millions or billions: `10.2 M`."""
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if size <= abs(value) < math.inf:
            return f"{value / size:.4g} {letter}"
    return number(value)


def percent(share: float) -> str:
    """Returns a percentage with one decimal: `98.3 %`."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else "not finite"


def tick(value: float) -> str:
    """Returns a text as short as the value allows: `0.5`, `20k`, `1e-6`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    if value == 0 or abs(value) >= 1e-3:
        return f"{value:.4g}"
    digits, exponent = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def time_of(seconds: float) -> str:
    """Returns the time of a step: `0.8 ms`, `431 ms`, `11.9 s`."""
    if not math.isfinite(seconds):
        return "not finite"
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


def span(seconds: float) -> str:
    """Returns a time from milliseconds to days: `120 ms`, `11.9 s`, `1:02:03`."""
    return duration(seconds) if 60 <= seconds < math.inf else time_of(seconds)


def energy_of(joules: float) -> str:
    """Returns an energy in watt-hours: `812 Wh`, `3.42 kWh`, `1.2 MWh`."""
    hours = joules / 3600
    for unit, scale in (("MWh", 1e6), ("kWh", 1e3)):
        if hours >= scale:
            return f"{hours / scale:.3g} {unit}"
    return f"{hours:.3g} Wh"


def size_of(size: float) -> str:
    """Returns a size in bytes: `1.2 GB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} bytes"


def ranks(numbers: Iterable[int]) -> str:
    """Returns `rank 3`, or `ranks 0-3, 7`."""
    text = runs_text(numbers, ", ")
    return f"rank{'s' if set(text) & {',', '-'} else ''} {text}"


_LOOKED_FOR = {"zero_shot_top1": "top-1", "retrieval_i2t_r1": "i2t R@1", "retrieval_t2i_r1": "t2i R@1"}
"""Metrics that people look for first, with short titles."""


def shown_metrics(values: Mapping[str, float], *, wide: bool = False) -> dict[str, str]:
    """Returns the texts of an evaluation's metrics by name: of those that people look for, or all if `wide`.

    An evaluation that has none of these shows all.
    """
    measured = [name for name in values if name not in ("step", "generation")]
    names = measured if wide else [name for name in _LOOKED_FOR if name in values] or measured
    return {name: metric_text(name, values[name], [values]) for name in names}


def short_title(name: str) -> str:
    """Returns a title for a column of a table."""
    return _LOOKED_FOR.get(name) or metric_title(name)


def metric_names(evaluations: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns the metrics' names in the order of their first appearance."""
    return list(dict.fromkeys(name for event in evaluations for name in event if name != "step"))


def is_share(name: str, evaluations: Sequence[Mapping[str, float]]) -> bool:
    """Returns whether a metric is a share, such as an accuracy or a recall.

    Those are floats from 0 to 1, and counts are integers; a median rank is a float too.
    """
    if name.endswith("_rank"):
        return False
    values = [event[name] for event in evaluations if name in event and math.isfinite(event[name])]
    return any(isinstance(value, float) for value in values) and all(0 <= value <= 1 for value in values)


def metric_text(name: str, value: float, evaluations: Sequence[Mapping[str, float]]) -> str:
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
