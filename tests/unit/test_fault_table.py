"""The table of faults: a row needs a test in which the run ends and one in which it goes on."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faults import ROWS, Fault, Row


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
    assert re.search(rf"^ok +{row} +1 passed +1 passed$", all_of_it.stdout, re.MULTILINE)
    assert re.search(r"^NOT OK +loss not finite +missing +missing$", all_of_it.stdout, re.MULTILINE)
    assert json.loads(all_of_it.stdout.splitlines()[-1]) == {"faults": len(ROWS), "passed": 1}
    assert all_of_it.returncode == 1
    assert json.loads(chosen.stdout.splitlines()[-1]) == {"faults": 1, "passed": 1}
    assert chosen.returncode == 0
