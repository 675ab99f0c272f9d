"""The process of one rank, as its supervisor starts and ends it, and the folder in memory in which the two meet. No torch."""

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

REAP_S = 3.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
"""What a supervisor takes for a wish that the run stop."""
_PREFIX = "clipship-rank-"
_LOCK = "supervisor"
_NOT_YET_LOCKED = "supervisor.new"
_UNLOCKED_S = 60.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def meeting_folder(memory: Path = Path("/dev/shm")) -> Iterator[Path]:
    """A fresh folder, removed afterwards; those that supervisors left behind when they were killed are removed first.

    In memory where that is possible: a page that a disk is writing would hold up the rank.
    """
    place = memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    sweep(place)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    with open(folder / _NOT_YET_LOCKED, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when this process ends, however it ends
        os.rename(folder / _NOT_YET_LOCKED, folder / _LOCK)  # under this name it is never seen unlocked while its supervisor lives
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sweep(place: Path) -> None:
    """Remove the folders whose supervisors are gone: nobody holds their lock. Process numbers would not do: containers share /dev/shm."""
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or somebody else swept it
            if _is_left(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    if not (folder / _LOCK).exists():  # just made, or killed before it was locked
        return time.time() - folder.stat().st_mtime > _UNLOCKED_S
    with open(folder / _LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def start_rank(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """In a session of its own: signals to the launcher's process group are the supervisor's to translate.

    Slurm sends them to every process of a step, whatever its session: the rank and its loader processes start with them ignored.
    """
    return subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=_before_exec)


def end_rank(rank: subprocess.Popen[bytes]) -> None:
    """SIGKILL for it and what it started; a rank that the kernel does not let go within REAP_S is left to it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        rank.wait(REAP_S)


def _before_exec() -> None:
    """In the child: what the supervisor heeds is ignored here, and in all that it starts; SIGKILL when the supervisor is killed."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
