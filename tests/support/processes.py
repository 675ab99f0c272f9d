"""Child processes of tests, which a failed assertion ends at once."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, AnyStr

TO_END_S = 5.0
"""Time that a child gets between SIGTERM and SIGKILL, so that it can end its own children."""


WAIT_S = 240.0


def until(
    reached: Callable[[], object],
    process: "subprocess.Popen[Any] | None" = None,
    *,
    limit_s: float = WAIT_S,
    otherwise: Callable[[], object] = lambda: "",
    every_s: float = 0.05,
) -> None:
    """Returns once it is so, while the process runs; fails with its output or what else there is to say."""
    limit = time.monotonic() + limit_s
    while not reached():
        assert process is None or process.poll() is None, (process.communicate(), otherwise())
        assert time.monotonic() < limit, otherwise()
        time.sleep(every_s)


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
