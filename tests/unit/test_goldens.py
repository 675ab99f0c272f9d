"""What tests stand on: goldens, which keep each text to the byte, and the table of faults."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.faults import ROWS, Fault, Row
from tests.support.goldens import apply, check, difference, read, write

LINES = st.lists(
    st.sampled_from(["", "a", "b", " a", "-a", "+a", "@@ a", "--- a", "\r", "\u2028"]), max_size=12
)
BASE = "".join(f"line {number}\n" for number in range(20))
TEXTS = {
    "base.txt": BASE,
    "a/more.txt": BASE.replace("line 7\n", "line 7\nmore\n"),
    "a/less.txt": BASE.removesuffix("\n"),
    "other.txt": "one\ntwo\n",
}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")}


@given(LINES, LINES)
def test_a_difference_makes_exactly_the_new_lines(old: list[str], new: list[str]) -> None:
    assert apply(old, list(difference(old, new))) == new


def test_what_is_near_is_a_difference_that_names_no_line_numbers(tmp_path: Path) -> None:
    (tmp_path / "base.txt").touch()
    write(tmp_path, TEXTS)
    assert files(tmp_path).keys() == {"base.txt", "other.txt", "a/more.txt.diff", "a/less.txt.diff"}
    assert (tmp_path / "a/more.txt.diff").read_text() == "--- base.txt\n+++ a/more.txt\n@@ line 7\n+more\n"
    assert {name: read(tmp_path, name) for name in TEXTS} == TEXTS


def test_writing_again_changes_nothing_and_writing_some_keeps_the_others(tmp_path: Path) -> None:
    write(tmp_path, TEXTS)
    written = files(tmp_path)
    write(tmp_path, TEXTS)
    assert files(tmp_path) == written
    changed = {"base.txt": BASE.replace("line 3", "line three")}
    write(tmp_path, changed)
    assert {name: read(tmp_path, name) for name in TEXTS} == TEXTS | changed


def test_every_changed_character_fails_and_shows_what_differs(tmp_path: Path) -> None:
    write(tmp_path, TEXTS)
    for name, text in TEXTS.items():
        check(tmp_path, name, text)
        for place in range(len(text)):
            with pytest.raises(pytest.fail.Exception, match="make goldens"):
                check(tmp_path, name, f"{text[:place]}x{text[place + 1 :]}")
    with pytest.raises(pytest.fail.Exception, match=r"(?s)@@.*\n-two\n\+2\n"):
        check(tmp_path, "other.txt", "one\n2\n")


def test_a_golden_that_is_missing_or_does_not_fit_says_what_writes_it(tmp_path: Path) -> None:
    (tmp_path / "base.txt").touch()
    write(tmp_path, TEXTS)
    (tmp_path / "base.txt").write_text("something else\n")
    for name in ("a/more.txt", "new.txt"):
        with pytest.raises(pytest.fail.Exception, match="`make goldens` writes it"):
            check(tmp_path, name, "text")


# The table of faults: a row needs a test in which the run ends and one in which it goes on


NEEDS = "not tried: needs sshd"


@pytest.mark.parametrize(
    ("ends", "goes_on", "fault", "passed"),
    [
        (["passed"], ["passed"], Fault(), True),
        (["passed"], [], Fault(), False),
        (["passed"], ["passed", "failed"], Fault(), False),
        (["passed"], [], Fault(never_goes_on="a reason"), True),
        ([], ["passed"], Fault(never_ends="a reason"), True),
        ([], [], Fault(never_ends="a reason"), False),
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
