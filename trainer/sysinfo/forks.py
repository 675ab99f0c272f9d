"""Forks of a process that has imported large libraries: when they are safe, and who is the child's parent."""

import ctypes
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer.sysinfo.parent import signal_with_parent

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_TASKS = Path("/proc/self/task")
_POLL_S = 0.0005


def adopt_orphans(adopts: bool = True) -> bool:
    """Makes this process the parent of every descendant whose own parent ends; returns whether it can be.

    `adopts=False` ends that.
    """
    return sys.platform == "linux" and not ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts))


def fork() -> int:
    """Forks as `os.fork` does. Python warns of any other thread; `can_fork` knows which do harm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def can_fork() -> bool:
    """Returns whether a child of this process would be whole: no thread runs that a fork would lose."""
    return not threads_lost()


def threads_lost() -> list[str]:
    """Returns the names of the threads that a child of this process would lack.

    Threads that their library ends before each fork, as OpenBLAS does, do no harm; one fork shows which
    these are. Nor do those that their library starts again in the child. Where no thread can be seen, as on
    macOS, one may be lost.
    """
    if not _TASKS.is_dir():
        return ["unknown"]
    child = fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    until = time.monotonic() + _ENDED_S
    while (found := _other_threads()) and time.monotonic() < until:
        time.sleep(_POLL_S)
    return found


_ENDED_S = 0.2
"""Longest time for which the kernel may show a thread that has been joined."""


def _other_threads() -> list[str]:
    with suppress(OSError):
        tasks = [task for task in _TASKS.iterdir() if task.name != str(os.getpid())]
        return sorted(name for name in map(_name, tasks) if name and name not in _START_AGAIN)
    return []


def _name(task: Path) -> str:
    """Returns a thread's name; nothing if it has ended meanwhile."""
    with suppress(OSError):
        return (task / "comm").read_text().strip() or "?"
    return ""


_START_AGAIN = frozenset({"jemalloc_bg_thd"})
"""Names of threads whose library holds its locks over a fork and starts them again in the child.

jemalloc does so (`background_thread_postfork_child` in its src/background_thread.c). pyarrow brings it,
pandas imports pyarrow, and transformers imports pandas, where they are installed.
"""


def fork_for(guardian: int) -> int:
    """Forks a child that the process `guardian` adopts, in a session of its own; returns 0 in the child.

    `guardian` is an ancestor that has called `adopt_orphans`. It can wait for the child as for its own, and
    the kernel kills the child when it ends. In this process it returns the id of a process that is gone.
    """
    middle = fork()
    if middle:
        os.waitpid(middle, 0)
        return middle
    try:
        own = os.getpid()
        if fork():
            os._exit(0)
        _wait_until(lambda: os.getppid() != own)
        signal_with_parent(signal.SIGKILL)
        if os.getppid() != guardian:  # it has ended, or it adopts no orphans
            os._exit(1)
        os.setsid()
    except BaseException:
        os._exit(1)
    return 0


def _wait_until(arrived: Callable[[], bool]) -> None:
    while not arrived():
        time.sleep(_POLL_S)
