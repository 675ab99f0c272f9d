"""A pytest plugin, `-p tests.support.faults`: prints the table of faults and the measured times.

`ROWS` has the faults. A test of one has the mark `fault(ROW)` if the run ends and says why, and
`fault(ROW, goes_on=True)` if the run goes on, which mostly takes `[recovery]`; several tests and their
parameters may belong to a row, and a test to several rows. Each row needs tests of both kinds, unless `ROWS`
says why it has none of one kind: a run of all of them fails without. A row whose tests are skipped, all those
of one kind, counts as not tried. The last line is JSON.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

measured: list[float] = []
"""Seconds from each fault to the end of the run that it ended; `tests.support.ends` adds to it."""


@dataclass(frozen=True)
class Fault:
    """Fault of a row, and why a column of it can have no tests; "" means that tests must be there."""

    never_ends: str = ""
    never_goes_on: str = ""


_BEFORE_TRAINING = "nothing is done yet that could be lost; a restart would meet the same fault"
_ASKED = "the run was asked to leave, which no restart may undo"

ROWS: Mapping[str, Fault] = {
    "rank SIGKILLed in a step, in evaluation, in a checkpoint": Fault(),
    "rank raises": Fault(),
    "rank leaves with a code and no reason": Fault(),
    "rank SIGSTOPped or stuck, rank 0 too": Fault(),
    "out of memory on one rank, by a limit": Fault(),
    "loader stalls; loader worker killed": Fault(),
    "supervisor SIGKILLed, rank 0's too": Fault(),
    "node lost, the coordinator's too": Fault(),
    "node frozen or cut off, rank 0's too": Fault(),
    "node gone when a limit passes, rank 0's too": Fault(),
    "node computes wrong sums, found by the preflight": Fault(),
    "a run over several machines: rank killed, node cut off": Fault(),
    "each end under Open MPI 4": Fault(),
    "shard corrupt, missing, unreadable for a while": Fault(),
    "newest checkpoint cut short or flipped bits": Fault(),
    "disk full while a checkpoint is written": Fault(),
    "loss not finite": Fault(),
    "one rank slow, in data or in compute": Fault(never_ends="a slow rank still trains"),
    "the whole run SIGSTOPped for longer than a limit": Fault(never_ends="time in which all rest is no hang"),
    "evaluation longer than the collective timeout: uneven over 4 ranks": Fault(
        never_ends="an evaluation that passes its own limit is a stuck rank"
    ),
    "master unreachable, port taken, one rank never starts": Fault(never_goes_on=_BEFORE_TRAINING),
    "unequal versions or code on one rank": Fault(never_goes_on=_BEFORE_TRAINING),
    "worlds of unequal size, N worlds of one": Fault(never_goes_on=_BEFORE_TRAINING),
    "two starts of one run at once": Fault(never_goes_on="the first start goes on; the second must not"),
    "two submits of one run at once": Fault(never_goes_on="the first goes on; the second must not"),
    "job file edited, between two starts or while it trains": Fault(),
    "half of the run folder removed, checkpoints or records": Fault(),
    "run folder copied, renamed or moved": Fault(),
    "run folder of another user": Fault(never_goes_on="it is not touched, and whoever owns it goes on"),
    "disk quota used up while a checkpoint is written": Fault(),
    "clock set back by two hours": Fault(),
    "SIGTERM to the launcher": Fault(),
    "SIGTERM or SIGUSR2 to one rank": Fault(never_goes_on=_ASKED),
    "second SIGTERM after a while": Fault(never_goes_on=_ASKED),
    "save on request takes too long": Fault(never_goes_on=_ASKED),
    "everything SIGKILLed at once: launcher, supervisors, ranks": Fault(),
}
"""Faults in the order of the table."""


@dataclass
class Row:
    """Outcomes of the tests of one row, and the times that they measured."""

    fault: Fault = Fault()
    ends: list[str] = field(default_factory=list)
    """Outcomes of the tests in which the run ends."""
    goes_on: list[str] = field(default_factory=list)
    """Outcomes of the tests in which the run goes on."""
    seconds: list[float] = field(default_factory=list)
    needs: set[str] = field(default_factory=set)
    """Reasons of the skipped tests."""

    @property
    def missing(self) -> list[str]:
        """Names of the columns that have no tests, and no reason for that."""
        columns = (
            ("ends", self.ends, self.fault.never_ends),
            ("goes on", self.goes_on, self.fault.never_goes_on),
        )
        return [name for name, outcomes, reason in columns if not reason and not outcomes]

    @property
    def not_tried(self) -> str:
        """Says what a column lacks whose tests were all skipped; "" where each column was tried."""
        skipped = any({*outcomes} == {"skipped"} for outcomes in (self.ends, self.goes_on))
        return f"not tried: {', '.join(sorted(self.needs))}" if skipped else ""

    def of_chosen(self) -> Fault:
        """Returns the fault where `-k` or a file name picks tests: a column without tests asks for none."""
        ends, goes_on = ("" if outcomes else "not chosen" for outcomes in (self.ends, self.goes_on))
        return Fault(never_ends=ends, never_goes_on=goes_on)

    @property
    def failed(self) -> bool:
        return "failed" in self.ends + self.goes_on or bool(self.missing)

    @property
    def passed(self) -> bool:
        return not self.failed and not self.not_tried

    def line(self, name: str) -> str:
        times = [seconds for seconds in self.seconds if seconds == seconds]  # nan: the run ended of itself
        span = f"{min(times):.1f} to {max(times):.1f} s" if times else ""
        state = "NOT OK" if self.failed else "-" if self.not_tried else "ok"
        ends, goes_on = cell(self.ends, self.fault.never_ends), cell(self.goes_on, self.fault.never_goes_on)
        return f"{state:<7} {name:<66} {ends:<24} {goes_on:<24} {self.not_tried or span}".rstrip()


def cell(outcomes: list[str], reason: str) -> str:
    """Returns how many tests passed, failed and were skipped; without tests `n/a`, or `missing`."""
    words = ("passed", "failed", "skipped")
    counts = ", ".join(f"{outcomes.count(word)} {word}" for word in words if word in outcomes)
    return counts or ("n/a" if reason else "missing")


def reasons() -> Iterator[str]:
    """Yields a line for each cell that no test can have."""
    for name, fault in ROWS.items():
        for column, reason in (("ends", fault.never_ends), ("goes on", fault.never_goes_on)):
            if reason:
                yield f"n/a     {name}: no test in which the run {column}: {reason}"


_rows: dict[str, Row] = {}
_CELLS, _SECONDS = "fault-cells", "fault-seconds"
"""Properties of a test's report: the cells that it fills, and the times that it measured."""


def _cells(item: pytest.Item) -> dict[tuple[str, bool], None]:
    """Returns the row of each mark of a test, and whether the run goes on there."""
    marks = item.iter_markers("fault")
    return {(str(mark.args[0]), bool(mark.kwargs.get("goes_on", False))): None for mark in marks}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses marks of unknown rows, also on tests that `-m` leaves out."""
    names = {name for item in items for name, _ in _cells(item)}
    if unknown := sorted(names - ROWS.keys()):
        raise pytest.UsageError(f"rows that tests.support.faults.ROWS does not have: {', '.join(unknown)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Gives the report what the table needs: it may go to another process, which prints the table."""
    report = yield
    report.user_properties += [(_CELLS, list(_cells(item))), (_SECONDS, list(measured))]  # type: ignore[attr-defined]
    measured.clear()
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    properties: dict[str, Any] = dict(report.user_properties)
    for name, goes_on in properties.get(_CELLS, ()):
        row = _rows.setdefault(name, Row())
        (row.goes_on if goes_on else row.ends).append(report.outcome)
        if report.skipped and isinstance(report.longrepr, tuple | list):  # file, line, reason
            row.needs.add(str(report.longrepr[2]).removeprefix("Skipped: "))
        row.seconds += [] if goes_on else properties[_SECONDS]  # until the end, which is not the fault's


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run if a row of the whole table has failed."""
    config = session.config
    if _is_worker(config) or config.option.collectonly:
        return
    asks_for_all = not config.option.keyword and config.args_source is pytest.Config.ArgsSource.TESTPATHS
    for name, fault in ROWS.items():
        if asks_for_all:
            _rows.setdefault(name, Row()).fault = fault
        elif name in _rows:
            _rows[name].fault = _rows[name].of_chosen()
    if any(row.failed for row in _rows.values()):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def _is_worker(config: pytest.Config) -> bool:
    """Says whether this is one of pytest-xdist's processes, whose reports go to another."""
    return hasattr(config, "workerinput")


def pytest_unconfigure(config: pytest.Config) -> None:
    """After pytest's own last line."""
    if _is_worker(config) or not _rows:
        return
    print(
        "\nfault, its tests in which the run ends, its tests in which the run goes on, "
        "and the seconds from the fault to the end\n"
    )
    for name in filter(_rows.__contains__, ROWS):
        print(_rows[name].line(name))
    print("", *reasons(), sep="\n")
    passed, failed = (sum(getattr(row, state) for row in _rows.values()) for state in ("passed", "failed"))
    print(json.dumps({"faults": len(_rows), "passed": passed, "not_tried": len(_rows) - passed - failed}))
