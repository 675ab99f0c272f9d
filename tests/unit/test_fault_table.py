"""The table of faults: a row needs a test in which the run ends and one in which it goes on."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

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


_FILE = """
import pytest
pytestmark = pytest.mark.fault({row!r}, goes_on={goes_on})
def test_it(): pass
@pytest.mark.skipif(True, reason="needs sshd")
@pytest.mark.fault("loss not finite", goes_on={goes_on})
def test_it_elsewhere(): pass
"""


def test_processes_of_pytest_give_one_table(tmp_path: Path) -> None:
    row = "rank raises"
    for goes_on in (False, True):
        (tmp_path / f"test_{goes_on}.py").write_text(_FILE.format(row=row, goes_on=goes_on))
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\nmarkers = fault(row, goes_on): a row\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.faults", "-n", "2", "--dist", "loadfile"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    all_of_it, chosen = run(), run("-k", "it")
    assert re.search(rf"^ok +{row}( +1 passed, 1 skipped){{2}}$", all_of_it.stdout, re.MULTILINE)
    assert re.search(rf"^- +loss not finite +1 skipped +1 skipped +{NEEDS}$", all_of_it.stdout, re.MULTILINE)
    assert re.search(r"^NOT OK +disk full while .* +missing +missing$", all_of_it.stdout, re.MULTILINE)
    assert json.loads(all_of_it.stdout.splitlines()[-1]) == {"faults": len(ROWS), "passed": 1, "not_tried": 1}
    assert all_of_it.returncode == 1
    assert json.loads(chosen.stdout.splitlines()[-1]) == {"faults": 2, "passed": 1, "not_tried": 1}
    assert chosen.returncode == 0
