"""A folder of the node's memory in which the ranks of a start keep their newest steps.

The supervisors of a node share it, so that it outlives every rank: the first one makes it before its rank
starts, the last one removes it. Its name follows from the id of the start and the node, so the supervisors
need not ask one another. Each holds a shared lock on a file in it; a folder without a holder is abandoned,
and the next start on the node removes it. Others can write in /dev/shm: only a folder that belongs to this
user, with mode 0700, is used. No torch.

MPI ends all supervisors of a node when one rank is gone; a launcher that sets CLIPSHIP_STARTS_AGAIN then
starts them again as the same start. The last supervisor leaves the folder there if the run has failed, and
the next start of another run removes it only after KEPT_S.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from trainer.safe_io.plain import is_own_folder, open_plain
from trainer.world.rendezvous import Rendezvous
from trainer.world.state_parts import newest_step
from trainer.world.variables import STARTS_AGAIN

STATE_DIR = "CLIPSHIP_STATE_DIR"
"""Variable with the folder in which a rank keeps its state in memory; not set if there is none."""
MEMORY = Path("/dev/shm")
KEPT_S = 900.0
"""Seconds for which a folder that was left for the same start is safe from others."""
_PREFIX = "clipship-state-"
_LOCK = "supervisors"
_KEPT = "kept"
_UNLOCKED_S = 60.0
_TRIES = 200
_WAIT_S = 0.01


def folder_name(start: str, node: str) -> str:
    """Returns the name of the folder of a start on a node, for this user."""
    text = f"{start} {node} {os.geteuid()}"
    return f"{_PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:24]}"


@contextmanager
def state_folder(env: Mapping[str, str], node: str, memory: Path = MEMORY) -> Iterator["StateFolder | None"]:
    """Makes the folder of this start on this node, or shares it with the node's other supervisors.

    Yields None where there can be none: without a start's id, without memory that can be written, or if
    another user has made the folder. Abandoned folders of this user are removed first.
    """
    rendezvous = Rendezvous.from_env(env)
    if rendezvous is None or not os.access(memory, os.W_OK | os.X_OK):
        yield None
        return
    name = folder_name(rendezvous.start, node)
    sweep(memory, but=name)
    held = _hold(memory / name)
    if held is None:
        yield None
        return
    folder = StateFolder(memory / name, held, may_return=bool(env.get(STARTS_AGAIN)))
    try:
        yield folder
    finally:
        folder.leave()


def with_state_folder(env: Mapping[str, str], folder: "StateFolder | None") -> dict[str, str]:
    """Returns a rank's environment with the folder in it, or without any."""
    own = {name: value for name, value in env.items() if name != STATE_DIR}
    return own if folder is None else {**own, STATE_DIR: str(folder.path)}


def newest_kept(env: Mapping[str, str]) -> int:
    """Returns the newest whole step in the folder of a rank's environment; 0 if there is none."""
    rendezvous = Rendezvous.from_env(env)
    if rendezvous is None or STATE_DIR not in env:
        return 0
    return newest_step(Path(env[STATE_DIR]), rendezvous.start)


class StateFolder:
    """The folder, held by this supervisor."""

    def __init__(self, path: Path, lock: IO[str], *, may_return: bool) -> None:
        self.path = path
        self._lock, self._may_return = lock, may_return
        self.failed = False
        """True if the run has failed, so that the same start may need the folder again."""

    def leave(self) -> None:
        """Gives up this supervisor's hold; the last holder removes the folder."""
        self._lock.close()
        with suppress(OSError):
            if self._may_return and self.failed:
                (self.path / _KEPT).touch()
            else:
                _remove_if_free(self.path)


def sweep(memory: Path, but: str = "") -> None:
    """Removes the folders of this user whose supervisors are all gone."""
    for folder in memory.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is another user's, or another process removed it
            if folder.name != but and is_own_folder(folder) and not _is_young(folder):
                _remove_if_free(folder)


def _is_young(folder: Path) -> bool:
    """Returns whether the folder was just made, or left for its start a short while ago."""
    if not (folder / _LOCK).exists():
        return time.time() - folder.lstat().st_mtime < _UNLOCKED_S
    kept = folder / _KEPT
    return kept.exists() and time.time() - kept.lstat().st_mtime < KEPT_S


def _remove_if_free(folder: Path) -> None:
    """Removes the folder unless a supervisor holds it. Raises OSError."""
    if not (folder / _LOCK).exists():
        shutil.rmtree(folder, ignore_errors=True)
        return
    with open(folder / _LOCK, opener=open_plain) as lock, suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


def _hold(folder: Path) -> IO[str] | None:
    """Makes the folder if it is missing and takes a shared lock in it; returns the open lock.

    Another supervisor may be removing the folder meanwhile, so it tries again until what it holds is what
    stands there. Returns None if the folder cannot be this user's own.
    """
    for _ in range(_TRIES):
        try:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            if not is_own_folder(folder) or stat.S_IMODE(folder.lstat().st_mode) & 0o077:
                return None
            lock = open(folder / _LOCK, "a", opener=open_plain)  # noqa: SIM115
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock.fileno()), (folder / _LOCK).lstat()):
                    (folder / _KEPT).unlink(missing_ok=True)
                    return lock
            except BaseException as error:
                lock.close()
                if not isinstance(error, OSError):
                    raise
            else:
                lock.close()
        except OSError:
            pass
        time.sleep(_WAIT_S)
    return None
