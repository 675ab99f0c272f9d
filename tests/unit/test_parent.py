"""Processes that a server forked end when the one that asked for them is killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

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
    with subprocess.Popen(
        [sys.executable, "program.py"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    ) as parent:
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
