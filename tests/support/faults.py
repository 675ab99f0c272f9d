"""A pytest plugin, `-p tests.support.faults`: prints the table of faults and the measured times.

The last line is JSON. A test of a fault has the mark `fault(ROW)`; several tests and their parameters may
belong to a row. A run ends after a fault, unless `[recovery]` lets it go on: a test of that has the mark
`fault(ROW, goes_on=True)`, and the table has a column for such tests.
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
    goes_on: list[str] = field(default_factory=list)
    """Outcomes of the tests in which the run goes on."""
    seconds: list[float] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        everything = self.outcomes + self.goes_on
        return "failed" not in everything and "passed" in everything

    def line(self, name: str) -> str:
        times = [seconds for seconds in self.seconds if seconds == seconds]  # nan: the run ended of itself
        span = f"{min(times):.1f} to {max(times):.1f} s" if times else ""
        ok = "ok" if self.passed else "NOT OK"
        return f"{ok:<7} {name:<66} {counts(self.outcomes):<24} {counts(self.goes_on):<24} {span}".rstrip()


def counts(outcomes: list[str]) -> str:
    """Returns how many tests passed, failed and were skipped."""
    words = ("passed", "failed", "skipped")
    return ", ".join(f"{outcomes.count(word)} {word}" for word in words if word in outcomes)


_rows: dict[str, Row] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    mark = item.get_closest_marker("fault")
    is_result = report.when == "call" or report.outcome != "passed"  # type: ignore[attr-defined]
    if mark is not None and is_result:
        row = _rows.setdefault(str(mark.args[0]), Row())
        goes_on = mark.kwargs.get("goes_on", False)
        (row.goes_on if goes_on else row.outcomes).append(report.outcome)  # type: ignore[attr-defined]
        row.seconds += [] if goes_on else measured  # until the end of the run, which is not the fault's
        measured.clear()
    return report


def pytest_unconfigure() -> None:
    """After pytest's own last line."""
    if not _rows:
        return
    print(
        "\nfault, its tests in which the run ends, its tests in which the run goes on, "
        "and the seconds from the fault to the end\n"
    )
    for name, row in _rows.items():
        print(row.line(name))
    print(json.dumps({"faults": len(_rows), "passed": sum(row.passed for row in _rows.values())}))
