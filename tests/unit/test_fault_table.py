"""The table of faults: a row needs a test in which the run ends and one in which it goes on."""

import pytest

from tests.support.faults import ROWS, Fault, Row

NEEDS = "not tried: needs sshd"


@pytest.mark.parametrize(
    ("ends", "goes_on", "fault", "passed"),
    [
        (["passed"], ["passed"], Fault(), True),
        (["passed"], [], Fault(), False),
        ([], ["passed"], Fault(), False),
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


@pytest.mark.parametrize(
    ("ends", "goes_on", "state"),
    [
        (["skipped"], ["skipped"], "- "),
        (["passed"], ["skipped", "skipped"], "- "),
        (["passed"], ["passed", "skipped"], "ok "),
        (["failed"], ["skipped"], "NOT OK "),
        (["skipped"], [], "NOT OK "),
    ],
)
def test_a_column_whose_tests_were_all_skipped_was_not_tried(
    ends: list[str], goes_on: list[str], state: str
) -> None:
    row = Row(Fault(), ends, goes_on, needs={"needs sshd"})
    line = row.line("a row")
    assert line.startswith(state)
    assert line.endswith(NEEDS) is ("passed" not in ends or "passed" not in goes_on)
    assert row.passed is (state == "ok ")
    assert row.failed is (state == "NOT OK ")


def test_no_row_lacks_both_columns() -> None:
    assert not [name for name, fault in ROWS.items() if fault.never_ends and fault.never_goes_on]


def test_an_empty_cell_is_named_unless_it_has_a_reason() -> None:
    assert Row(Fault(), ["passed"]).missing == ["goes on"]
    assert Row(Fault(), [], ["passed"]).missing == ["ends"]
    assert Row(Fault(never_ends="a reason"), [], ["passed"]).missing == []
    assert Row(Fault(never_ends="a reason")).missing == ["goes on"]


def test_of_chosen_tests_no_more_is_asked_than_they_fill() -> None:
    assert Row(Fault(), ["passed"]).of_chosen() == Fault(never_goes_on="not chosen")
    assert Row(Fault(), ["passed"], ["passed"]).of_chosen() == Fault()
