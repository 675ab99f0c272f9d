"""One start of a run at a time: a lock on a file of the run folder, which the kernel drops however its process ends. No torch."""

import datetime
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.errors import Preempted, Unfit

LOCK = ".lock"
WAIT_S = 120.0
"""NFS keeps the locks of a node that is gone for its lease, 90 s."""
_TAKEN = (errno.EACCES, errno.EAGAIN)


@dataclass(frozen=True)
class Holder:
    """Who writes the run folder, as the lock's file says it; all empty while it is being written."""

    node: str = ""
    process: int = 0
    since: str = ""
    """In UTC (ISO 8601)."""
    start: str = ""
    """As `Meeting.start` names it; empty where no launcher of ours has named a meeting."""

    def __str__(self) -> str:
        return f"process {self.process} on {self.node} since {self.since}" if self.node else "another process"


def hold(
    folder: Path, node: str, start: str, longest_s: float, say: Callable[[str], None], stop_asked: Callable[[], bool] = lambda: False
) -> None:
    """Lock the run folder until this process ends; where its file system has no locks, nothing is locked.

    Raises OSError where the file cannot be written, Unfit where another process has the lock still after the wait,
    which lasts `longest_s` seconds at most and begins with a sentence for `say`; Preempted where a stop is asked for in it.
    """
    path = folder / LOCK
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    if not _take(lock):
        limit_s = min(longest_s, WAIT_S)
        say(f"{folder} is written by {_holder(path)}: waiting up to {limit_s:.0f} s for its end")
        limit = time.monotonic() + limit_s
        while not _take(lock):
            if time.monotonic() > limit:
                os.close(lock)
                raise Unfit(
                    f"the run folder {folder} is written by {_holder(path)}: end that start of the run first, or make this "
                    "another run with --set name=... (if that node is lost, its file system keeps the lock for some minutes)"
                )
            if stop_asked():
                os.close(lock)
                raise Preempted(f"asked to stop while {folder} was written by {_holder(path)}: nothing was begun")
            time.sleep(0.2)
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    os.ftruncate(lock, 0)
    os.write(lock, json.dumps(asdict(Holder(node, os.getpid(), since, start))).encode())
    os.fsync(lock)  # for the other nodes of a network file system: the file stays open


def who_holds(folder: Path) -> Holder | None:
    """The process that writes the run folder; None where there is none, or locks cannot tell. Not for the holder itself."""
    path = folder / LOCK
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return None if _take(lock) else _holder(path)
    finally:
        os.close(lock)  # which lets go of the lock


def _take(lock: int) -> bool:
    """Of POSIX: it passes through NFS, and processes that fork do not share it."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        return problem.errno not in _TAKEN
    return True


def _holder(path: Path) -> Holder:
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Holder()
