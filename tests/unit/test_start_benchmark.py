"""A benchmark that is ended leaves no process behind."""

import os
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.start import Watched


def test_processes_in_sessions_of_their_own_end_too(tmp_path: Path) -> None:
    """torchrun starts its ranks like that."""
    run = Watched(["sh", "-c", "setsid sleep 300 & echo $!; wait"], tmp_path, os.environ)
    run.wait(lambda: bool(run.lines))
    child = Path("/proc", run.lines[0][1], "cmdline")
    while not child.read_bytes().startswith(b"sleep"):  # then it is in its own session
        time.sleep(0.01)
    run.kill()
    run.wait(run.has_ended)
    for _ in range(300):
        with suppress(OSError):  # its parent may not have taken note of its end yet
            if child.read_bytes():
                time.sleep(0.1)
                continue
        break
    else:
        raise AssertionError("it lives")
