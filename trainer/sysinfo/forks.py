"""Forks of a process that has imported large libraries: when they are safe, and who is the child's parent."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
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


def can_fork() -> bool:
    """Returns whether a child of this process would be whole: no thread runs that a fork would lose.

    Threads that their library ends before each fork, as OpenBLAS does, do no harm; one fork shows which
    these are.
    """
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return _TASKS.is_dir() and len(list(_TASKS.iterdir())) == 1


def fork_for(guardian: int) -> int:
    """Forks a child that the process `guardian` adopts, in a session of its own; returns 0 in the child.

    `guardian` is an ancestor that has called `adopt_orphans`. It can wait for the child as for its own, and
    the kernel kills the child when it ends. In this process it returns the id of a process that is gone.
    """
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return middle
    try:
        own = os.getpid()
        if os.fork():
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
