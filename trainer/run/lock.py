"""Lock on a file of the run folder, so that one start of a run writes it at a time.

The kernel releases the lock however the process ends. Imports no torch.
"""

import datetime
import errno
import fcntl
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.errors import MachineError, Preempted
from trainer.run.layout import LOCK
from trainer.safe_io.plain import open_plain, read_as

WAIT_S = 120.0
"""Seconds to wait for the lock. NFS keeps the locks of a lost node for its lease, 90 s."""
FENCED_S = 5.0
"""Seconds after which the rank 0 of a later generation takes the lock from that of an earlier one.

That one's node is lost, or cut off and has ended its ranks by itself, so it writes no more; but the file
system may keep its lock for long.
"""
_TAKEN = (errno.EACCES, errno.EAGAIN)
_FLOCK, _TYPE = ("hhqqi4x", 0) if sys.platform == "linux" else ("qqihh", 3)
"""Layout of C's `struct flock`, and the place of `l_type` in it: on Linux, and on macOS and the BSDs."""


@dataclass(frozen=True)
class Holder:
    """The process that writes the run folder, as the lock file names it.

    All fields are empty while the file is being written.
    """

    node: str = ""
    process: int = 0
    since: str = ""
    """Time when the lock was taken, in UTC (ISO 8601)."""
    start: str = ""
    """Start of the run, as `Rendezvous.start` names it; empty if Clipship's launcher did not start it."""
    generation: int = 1
    """Generation of ranks of that start."""

    def is_before(self, start: str, generation: int) -> bool:
        """Returns whether it belongs to an earlier generation of the same start."""
        return bool(start) and self.start == start and self.generation < generation

    def __str__(self) -> str:
        return f"process {self.process} on {self.node} since {self.since}" if self.node else "another process"


def hold(
    folder: Path,
    node: str,
    start: str,
    longest_s: float,
    say: Callable[[str], None],
    stop_requested: Callable[[], bool] = lambda: False,
    generation: int = 1,
) -> None:
    """Lock the run folder until this process ends; a file system without locks locks nothing.

    If another process has the lock, waits for it up to `longest_s` seconds (at most WAIT_S), after telling
    `say` so. If that belongs to an earlier `generation` of the same start, the lock is taken from it after
    FENCED_S seconds. Raises OSError if the file cannot be written, MachineError if the lock is still taken
    after the wait, Preempted if `stop_requested` becomes true meanwhile.
    """
    path = folder / LOCK
    lock = open_plain(path, os.O_RDWR | os.O_CREAT)
    if not _take(lock):
        limit_s = min(longest_s, WAIT_S)
        say(f"{_holder(path)} is writing to {folder}: waiting up to {limit_s:.0f} s for it to end")
        limit, fenced = time.monotonic() + limit_s, time.monotonic() + FENCED_S
        while not _take(lock):
            if time.monotonic() > fenced and _holder(path).is_before(start, generation):
                os.close(lock)
                lock = _replace(path)
                break
            if time.monotonic() > limit:
                os.close(lock)
                raise MachineError(
                    f"{_in_use(folder, _holder(path))} (if that node was lost, the file system may keep the "
                    "lock for some minutes)"
                )
            if stop_requested():
                os.close(lock)
                raise Preempted(
                    f"asked to stop while {_holder(path)} was writing to {folder}: this start did nothing"
                )
            time.sleep(0.2)
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    os.ftruncate(lock, 0)
    os.write(lock, json.dumps(asdict(Holder(node, os.getpid(), since, start, generation))).encode())
    os.fsync(lock)  # for the other nodes of a network file system: the file stays open


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lets one process at a time into the block, which lasts for moments; the others wait.

    A file system without locks lets in all. Raises OSError if the lock file cannot be written.
    """
    with open(folder / LOCK, "a", opener=open_plain) as lock:  # its end releases the lock
        with suppress(OSError):
            fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def who_holds(folder: Path) -> Holder | None:
    """Returns the process that writes the run folder.

    Returns None if there is none, or if the file system has no locks. The holder itself must not call this.
    """
    held, holder = is_held(folder)
    return holder if held else None


def refuse_second_start(folder: Path) -> None:
    """Raises MachineError if a process of this machine writes the run folder: waiting would be in vain."""
    holder = who_holds(folder)
    if holder is not None and holder.node == os.uname().nodename:
        raise MachineError(_in_use(folder, holder))


def _in_use(folder: Path, holder: Holder) -> str:
    return (
        f"{holder} is writing to the run folder {folder}: stop that start of the run first, or choose "
        "another name with --set name=..."
    )


def is_held(folder: Path) -> tuple[bool | None, Holder]:
    """Returns whether a process holds the run folder, and the last process that did, which may be gone.

    The first is None if the file system has no locks. The lock is asked for and never taken, since a start or
    another reader would take this process for the holder. Reading the lock file is enough, so it works on
    another user's run. The holder itself must not call this: closing the file would release its lock.
    """
    path = folder / LOCK
    try:
        lock = open_plain(path, os.O_RDONLY)
    except OSError:
        return None, Holder()
    try:
        fields = [0] * 5
        fields[_TYPE] = fcntl.F_WRLCK
        answer = fcntl.fcntl(lock, fcntl.F_GETLK, struct.pack(_FLOCK, *fields))
        held: bool | None = struct.unpack(_FLOCK, answer)[_TYPE] != fcntl.F_UNLCK
    except OSError:
        held = None
    finally:
        os.close(lock)
    return held, _holder(path)


def _take(lock: int) -> bool:
    """Take the lock without waiting; returns False if another process has it.

    It is a POSIX lock: it works over NFS, and forked processes do not share it.
    """
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        return problem.errno not in _TAKEN
    return True


def _replace(path: Path) -> int:
    """Puts a new file, which this process has locked, in the place of the lock file; returns its number."""
    temporary = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}")
    lock = open_plain(temporary, os.O_RDWR | os.O_CREAT)
    _take(lock)
    os.replace(temporary, path)
    return lock


def _holder(path: Path) -> Holder:
    return read_as(Holder, path) or Holder()
