"""One start of a run at a time: a lock on a file of the run folder, which the kernel drops however its process ends. No torch."""

import datetime
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from trainer.errors import Unfit

LOCK = ".lock"
HERE_S = 20.0
"""The wait for a start on this node: one that lost its launcher has left by then."""
ELSEWHERE_S = 120.0
"""The wait for a start on another node: NFS keeps the locks of a node that is gone for its lease, 90 s."""
_TAKEN = (errno.EACCES, errno.EAGAIN)


def hold(folder: Path, node: str, longest_s: float, say: Callable[[str], None]) -> None:
    """Lock the run folder until this process ends; where its file system has no locks, nothing is locked.

    Raises OSError where the file cannot be written, Unfit where another process has the lock still after the wait,
    which lasts `longest_s` seconds at most and begins with a sentence for `say`.
    """
    path = folder / LOCK
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    if not _take(lock):
        other = _holder(path)
        limit_s = min(longest_s, HERE_S if other.get("node") == node else ELSEWHERE_S)
        say(f"{folder} is written by {_words(other)}: waiting up to {limit_s:.0f} s for its end")
        limit = time.monotonic() + limit_s
        while not _take(lock):
            if time.monotonic() > limit:
                os.close(lock)
                raise Unfit(
                    f"the run folder {folder} is written by {_words(_holder(path))}: end that start of the run first, or make this "
                    "another run with --set name=... (if that node is lost, its file system keeps the lock for some minutes)"
                )
            time.sleep(0.2)
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    os.ftruncate(lock, 0)
    os.write(lock, json.dumps({"node": node, "process": str(os.getpid()), "since": since}).encode())


def who_holds(folder: Path) -> str | None:
    """The start that writes the run folder, in words; None where there is none, or locks cannot tell. Not for the holder itself."""
    path = folder / LOCK
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return None if _take(lock) else _words(_holder(path))
    finally:
        os.close(lock)  # which lets go of the lock


def _take(lock: int) -> bool:
    """Of POSIX: it passes through NFS, and processes that fork do not share it."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        return problem.errno not in _TAKEN
    return True


def _holder(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it is just being written
        return {}
    return found if isinstance(found, dict) else {}


def _words(holder: dict[str, str]) -> str:
    if "node" not in holder:
        return "another process"
    return f"process {holder.get('process')} on {holder['node']} since {holder.get('since')}"
