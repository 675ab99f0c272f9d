"""Limits that the figures of `benchmarks.goodput` must keep. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limit:
    """Bound of one figure: what it must be at least, or at most."""

    least: float | None = None
    most: float | None = None
    unit: str = ""

    @property
    def worst(self) -> Callable[[Sequence[float]], float]:
        """Function that chooses the worst of several values."""
        return min if self.least is not None else max

    def is_met(self, value: float) -> bool:
        """Returns whether a figure keeps the limit."""
        return value >= self.least if self.least is not None else value <= (self.most or 0)

    def words(self) -> str:
        """Returns the limit in words."""
        if self.least is True:
            return "true"
        side, bound = ("at least", self.least) if self.least is not None else ("at most", self.most)
        return f"{side} {bound:g}{self.unit}"


LIMITS = {
    "useful_share": Limit(least=0.95),
    "recovery_s_median_rank": Limit(most=10.0, unit=" s"),
    "recovery_s_median_node": Limit(most=20.0, unit=" s"),
    "steps_redone_max": Limit(most=1),
    "bit_equal": Limit(least=True),
    "samples_lost": Limit(most=0),
    "samples_twice": Limit(most=0),
    "fewer_ranks_difference": Limit(most=1e-6),
    "fewer_ranks_steps": Limit(least=1),
    "unrecorded_share": Limit(most=0.02),
    "ended_run": Limit(most=0),
    "not_made": Limit(most=0),
    "done": Limit(least=True),
}
"""Limit of each figure of a backend."""


def worst(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns each figure's worst value over the backends; None if one of them has none."""
    found = {}
    for name, limit in LIMITS.items():
        if values := [report[name] for report in reports if name in report]:
            found[name] = None if None in values else limit.worst(values)
    return found


def missed(backend: str, report: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each limit that the figures of a backend do not keep."""
    for name, limit in LIMITS.items():
        if name not in report:
            continue
        value = report[name]
        if value is None:
            yield f"{backend}: {name} is not known, and must be {limit.words()}"
        elif not limit.is_met(value):
            shown = str(value).lower() if isinstance(value, bool) else f"{value:g}{limit.unit}"
            why = _causes(report) if name == "useful_share" else ""
            yield f"{backend}: {name} is {shown}, and must be {limit.words()}{why}"


def _causes(report: Mapping[str, Any]) -> str:
    """Returns what the rest of the time was spent on, with and without faults, as the run recorded it."""
    parts = []
    for name, words in (("", "with faults"), ("_without_faults", "without")):
        seconds: Mapping[str, float] = report.get(f"lost_s{name}") or {}
        whole = report.get(f"seconds{name}") or 0.0
        largest = sorted(seconds.items(), key=lambda pair: -pair[1])
        shares = [f"{cause} {lost / whole:.1%}" for cause, lost in largest if whole and lost / whole >= 0.001]
        if shares:
            parts.append(f"{words} {', '.join(shares)}")
    return f" (the rest: {'; '.join(parts)})" if parts else ""
