"""Formats numbers and lists of ranks for people. Pure; no torch."""

import math
from collections.abc import Iterable

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
