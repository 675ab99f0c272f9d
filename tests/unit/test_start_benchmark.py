"""A benchmark that is ended leaves no process behind."""

import os
import time
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
    assert ends_within(30.0, child), "it lives"


def ends_within(limit_s: float, command_line: Path) -> bool:
    """Returns whether the process ends; its parent may take note of that a little later."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        try:
            if not command_line.read_bytes():
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False
