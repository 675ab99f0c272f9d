"""Takes note of children that have ended, which otherwise stay as zombies; never waits for one."""

import os
from collections.abc import Collection
from contextlib import suppress


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
