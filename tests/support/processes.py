"""Child processes of tests, which a failed assertion ends at once."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import AnyStr

TO_END_S = 5.0
"""Time that a child gets between SIGTERM and SIGKILL, so that it can end its own children."""


def command_line(pid: int) -> bytes:
    """Words of a process, each with a zero byte behind it; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def ended_on_failure(
    process: subprocess.Popen[AnyStr], to_end_s: float = TO_END_S
) -> Iterator[subprocess.Popen[AnyStr]]:
    """Waits for the process at the end, as `with process` does; an exception ends the process first.

    Without that, a failed assertion would wait until a child that sleeps wakes up.
    """
    with process:
        try:
            yield process
        except BaseException:
            _end(process, to_end_s)
            raise


def _end(process: subprocess.Popen[AnyStr], to_end_s: float) -> None:
    process.terminate()
    try:
        process.wait(to_end_s)
    except subprocess.TimeoutExpired:
        process.kill()
