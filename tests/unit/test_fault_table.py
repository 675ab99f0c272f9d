"""The table of faults: a row needs a test in which the run ends and one in which it goes on."""

import pytest

from tests.support.faults import ROWS, Fault, Row, empty_cells


@pytest.mark.parametrize(
    ("ends", "goes_on", "fault", "passed"),
    [
        (["passed"], ["passed"], Fault(), True),
        (["passed"], [], Fault(), False),
        ([], ["passed"], Fault(), False),
        (["passed"], ["skipped"], Fault(), False),
        (["passed"], ["passed", "failed"], Fault(), False),
        (["passed"], [], Fault(never_goes_on="a reason"), True),
        ([], ["passed"], Fault(never_ends="a reason"), True),
        ([], [], Fault(never_ends="a reason"), False),
        (["failed"], ["passed"], Fault(never_ends="a reason"), False),
    ],
)
def test_a_row_passes_if_both_columns_have_a_passed_test_or_a_reason(
    ends: list[str], goes_on: list[str], fault: Fault, passed: bool
) -> None:
    row = Row(fault, ends, goes_on)
    assert row.passed is passed
    assert row.line("a row").startswith("ok " if passed else "NOT OK ")


def test_no_row_lacks_both_columns() -> None:
    assert not [name for name, fault in ROWS.items() if fault.never_ends and fault.never_goes_on]


def test_an_empty_cell_is_named_unless_it_has_a_reason() -> None:
    cells = {(name, goes_on) for name in ROWS for goes_on in (False, True)}
    assert list(empty_cells(cells)) == []
    assert list(empty_cells(cells - {("rank raises", True), ("loss not finite", False)})) == [
        "rank raises: goes on",
        "loss not finite: ends",
    ]
    slow = "one rank slow, in data or in compute"
    assert list(empty_cells(cells - {(slow, False)})) == []
    assert list(empty_cells(cells - {(slow, True)})) == [f"{slow}: goes on"]
