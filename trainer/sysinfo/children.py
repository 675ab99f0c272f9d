"""Looks after processes: children that would stay as zombies, and others by what /proc tells of them.

Nothing here waits for a process.
"""

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path


def reap(which: int = -1, *, but: Collection[int] = ()) -> dict[int, int]:
    """Returns the exit codes of children that have ended, by process; -N after signal N.

    `which` is as for `os.waitpid`: -1 for all, -N for those of process group N, or one process. It stops at a
    child of `but`, whose end is left to those who wait for it.
    """
    codes: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (ended := _next_ended() if but else which) not in but:
            # With `but` it is that very child: one of `but` may have ended since.
            pid, status = os.waitpid(ended, os.WNOHANG)
            if not pid:
                break
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes


def _next_ended() -> int:
    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return ended.si_pid if ended else 0


def is_child(pid: int) -> bool:
    """Returns whether this process has such a child, running or not."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def signal_all(pids: Iterable[int], number: int) -> None:
    """Sends a signal to those of the processes that have not ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def processes_with(mark: bytes, file: str, among: Iterable[int] | None = None) -> list[int]:
    """Returns the processes, of all or of some, whose file in /proc holds the mark, such as `environ`."""
    if among is None:
        among = (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))
    return [pid for pid in among if mark in _of_process(pid, file)]


def _of_process(pid: int, file: str) -> bytes:
    try:
        return Path("/proc", str(pid), file).read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""
