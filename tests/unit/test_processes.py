"""Children end: those of a test that fails, and those that a server forked for one that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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


POOL = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from trainer.sysinfo.parent import end_with_parent
if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(600)
"""


def test_a_process_ends_when_the_one_that_asked_for_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(POOL)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "program.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            assert Path(f"/proc/{child}").exists()
        finally:
            parent.kill()
    limit = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists(), f"process {child} outlives the one that asked for it"
