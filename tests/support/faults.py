"""A pytest plugin, `-p tests.support.faults`: prints the table of faults and the measured times.

The last line is JSON. A test of a fault has the mark `fault(ROW)`; several tests and their parameters may
belong to a row.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

measured: list[float] = []
"""Seconds from each fault to the end of the run that it ended; `tests.support.ends` adds to it."""


@dataclass
class Row:
    """Outcomes of the tests of one row, and the times that they measured."""

    outcomes: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return "failed" not in self.outcomes and "passed" in self.outcomes

    def line(self, name: str) -> str:
        times = [seconds for seconds in self.seconds if seconds == seconds]  # nan: the run ended of itself
        span = f"{min(times):.1f} to {max(times):.1f} s" if times else ""
        counts = ", ".join(
            f"{self.outcomes.count(word)} {word}"
            for word in ("passed", "failed", "skipped")
            if word in self.outcomes
        )
        return f"{'ok' if self.passed else 'NOT OK':<7} {name:<66} {counts:<24} {span}"


_rows: dict[str, Row] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    mark = item.get_closest_marker("fault")
    counts = report.when == "call" or report.outcome != "passed"  # type: ignore[attr-defined]
    if mark is not None and counts:
        row = _rows.setdefault(str(mark.args[0]), Row())
        row.outcomes.append(report.outcome)  # type: ignore[attr-defined]
        row.seconds += measured
        measured.clear()
    return report


def pytest_unconfigure() -> None:
    """After pytest's own last line."""
    if not _rows:
        return
    print("\nfault, its tests, and the seconds from the fault to the end of the run\n")
    for name, row in _rows.items():
        print(row.line(name))
    print(json.dumps({"faults": len(_rows), "passed": sum(row.passed for row in _rows.values())}))
