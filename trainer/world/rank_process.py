"""Starts and ends the process of one rank, and makes the folder in memory that it shares with its supervisor.

No torch.
"""

import glob
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from trainer.safe_io.folders import hold, remove_abandoned, remove_tree
from trainer.sysinfo.children import reap
from trainer.sysinfo.parent import signal_with_parent
from trainer.sysinfo.signals import SIGNALS

REAP_S = 3.0
_PREFIX = "clipship-rank-"
_LOCK = "supervisor"


class RankProcess(Protocol):
    """Process of a rank, with the methods of Popen that its supervisor uses."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Returns the exit code, minus the signal's number after a signal, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the exit code. Raises subprocess.TimeoutExpired."""


@contextmanager
def rank_folder(memory: Path = Path("/dev/shm")) -> Iterator[Path]:
    """Makes a fresh folder and removes it afterwards.

    Folders that killed supervisors left behind are removed first. The folder is in memory if possible: while
    a disk writes a page, the rank could not write to it.
    """
    parent = memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    sweep(parent, memory)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    with hold(folder, _LOCK):
        try:
            yield folder
        finally:
            _remove(memory, folder)


def sweep(parent: Path, memory: Path) -> None:
    """Removes the folders of this user whose supervisors are gone; `memory` is /dev/shm."""
    remove_abandoned(parent.glob(f"{_PREFIX}*"), _LOCK, partial(_remove, memory))


def _remove(memory: Path, folder: Path) -> None:
    """Removes a rank's folder, and first the named semaphores that a killed rank has left in memory.

    Their names begin with the folder's, see `trainer.data.processes`.
    """
    for semaphore in memory.glob(f"sem.{glob.escape(folder.name)}-*"):
        with suppress(OSError):
            semaphore.unlink()
    remove_tree(folder)


def start_rank(
    command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts the rank in a session of its own; it inherits the descriptors `pass_fds`.

    The supervisor translates signals to the launcher's process group. Slurm signals every process of a step,
    whatever its session: so the rank and its loader processes start with these signals ignored.
    """
    return subprocess.Popen(
        command, env=env, start_new_session=True, pass_fds=pass_fds, preexec_fn=_before_exec
    )


def end_rank(rank: RankProcess) -> None:
    """Kills the rank and all that it started, with SIGKILL.

    If the kernel has not ended the rank within REAP_S, it is left to the kernel.
    """
    kill_rank(rank)
    with suppress(subprocess.TimeoutExpired):
        rank.wait(REAP_S)


def reap_group(rank: RankProcess) -> None:
    """Takes note of the end of processes that the rank started and this process adopted; does not wait.

    The rank itself must have ended and been waited for.
    """
    reap(-rank.pid)


def kill_rank(rank: RankProcess) -> None:
    """Sends SIGKILL to the rank and all that it started, and does not wait for their end."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, signal.SIGKILL)


def _before_exec() -> None:
    """Prepares the child: it ignores the supervisor's signals and is killed when the supervisor dies.

    All that the child starts ignores those signals too.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal_with_parent(signal.SIGKILL)
