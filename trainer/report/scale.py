"""Axes: the place of a value, and the round values to write beside an axis. Pure; no torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

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
