"""A folder of the node's memory in which the ranks of a start keep their newest steps.

The supervisors of a node share it, so that it outlives every rank: the first one makes it before its rank
starts, the last one removes it. Its name follows from the id of the start and the node, so the supervisors
need not ask one another. Each holds the folder (`trainer.safe_io.folders`), and the next start on the node
removes one that nobody holds. No torch.

MPI ends all supervisors of a node when one rank is gone; a launcher that sets CLIPSHIP_STARTS_AGAIN then
starts them again as the same start. The last supervisor leaves the folder there if the run has failed, and
the next start of another run removes it only after KEPT_S.
"""

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from trainer.safe_io.folders import hold, remove_abandoned, remove_free
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
    try:
        held = hold(memory / name, _LOCK)
        (memory / name / _KEPT).unlink(missing_ok=True)
    except OSError:
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
                remove_free(self.path, _LOCK)


def sweep(memory: Path, but: str = "") -> None:
    """Removes the folders of this user whose supervisors are all gone."""
    found = (folder for folder in memory.glob(f"{_PREFIX}*") if folder.name != but)
    remove_abandoned((folder for folder in found if not _is_kept(folder)), _LOCK)


def _is_kept(folder: Path) -> bool:
    """Returns whether the folder was left for its start a short while ago."""
    with suppress(OSError):
        return time.time() - (folder / _KEPT).lstat().st_mtime < KEPT_S
    return False
