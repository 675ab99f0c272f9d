"""A failed assertion ends the children of a test."""

import signal
import subprocess
import sys

import pytest

from tests.support.processes import ended_on_failure

DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begun', flush=True); "
    "time.sleep(60)"
)


def test_a_failed_assertion_ends_a_child_that_sleeps() -> None:
    process = subprocess.Popen(["sleep", "60"])
    with pytest.raises(AssertionError, match="failed"), ended_on_failure(process, to_end_s=60):
        raise AssertionError("failed")
    assert process.returncode == -signal.SIGTERM


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    with pytest.raises(AssertionError, match="failed"), ended_on_failure(process, to_end_s=0.1):
        raise AssertionError("failed")
    assert process.returncode == -signal.SIGKILL


def test_a_child_ends_by_itself_where_nothing_fails() -> None:
    with ended_on_failure(subprocess.Popen(["sh", "-c", "sleep 0.2; exit 3"])) as process:
        pass
    assert process.returncode == 3
