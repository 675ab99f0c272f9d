"""A pytest plugin, `-p tests.support.faults`: prints the table of faults and the measured times.

`ROWS` has the faults. A test of one has the mark `fault(ROW)` if the run ends and says why, and
`fault(ROW, goes_on=True)` if the run goes on, which mostly takes `[recovery]`; several tests and their
parameters may belong to a row, and a test to several rows. Each row needs tests of both kinds, unless `ROWS`
says why it has none of one kind. The last line is JSON.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

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

    @property
    def missing(self) -> list[str]:
        """Names of the columns that have no passed test, and no reason for that."""
        columns = (
            ("ends", self.ends, self.fault.never_ends),
            ("goes on", self.goes_on, self.fault.never_goes_on),
        )
        return [name for name, outcomes, reason in columns if not reason and "passed" not in outcomes]

    @property
    def passed(self) -> bool:
        return "failed" not in self.ends + self.goes_on and not self.missing

    def line(self, name: str) -> str:
        times = [seconds for seconds in self.seconds if seconds == seconds]  # nan: the run ended of itself
        span = f"{min(times):.1f} to {max(times):.1f} s" if times else ""
        ok = "ok" if self.passed else "NOT OK"
        ends, goes_on = cell(self.ends, self.fault.never_ends), cell(self.goes_on, self.fault.never_goes_on)
        return f"{ok:<7} {name:<66} {ends:<24} {goes_on:<24} {span}".rstrip()


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
_faults: dict[str, Fault] = dict(ROWS)
"""Faults of this session: where `-k` or a file name picks tests, columns without tests ask for none."""


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


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuses a table with an empty cell if all of it is asked for."""
    chosen = {cell for item in session.items for cell in _cells(item)}
    config = session.config
    if config.option.keyword or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        _faults.update({name: _of_chosen(name, chosen) for name in ROWS})
    elif empty := list(empty_cells(chosen)):
        raise pytest.UsageError("no test for these cells of the table of faults:\n" + "\n".join(empty))


def _of_chosen(name: str, chosen: Collection[tuple[str, bool]]) -> Fault:
    ends, goes_on = ("" if (name, column) in chosen else "not chosen" for column in (False, True))
    return Fault(never_ends=ends, never_goes_on=goes_on)


def empty_cells(chosen: Collection[tuple[str, bool]]) -> Iterator[str]:
    """Yields each row that lacks tests, with its columns; `chosen` has the row of each test and `goes_on`."""
    for name, fault in ROWS.items():
        ends, goes_on = (["passed"] if (name, column) in chosen else [] for column in (False, True))
        row = Row(fault, ends, goes_on)
        if row.missing:
            yield f"{name}: {', '.join(row.missing)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call" or report.outcome != "passed":  # type: ignore[attr-defined]
        for name, goes_on in _cells(item):
            row = _rows.setdefault(name, Row(_faults[name]))
            (row.goes_on if goes_on else row.ends).append(report.outcome)  # type: ignore[attr-defined]
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
    for name in filter(_rows.__contains__, ROWS):
        print(_rows[name].line(name))
    print("", *reasons(), sep="\n")
    print(json.dumps({"faults": len(_rows), "passed": sum(row.passed for row in _rows.values())}))
