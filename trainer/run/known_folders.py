"""Folders in which this user has started runs: links in the user's state, which are hints and nothing more.

Only the run folders say what runs there are. A link to a folder that is gone is passed over. Imports no
torch.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainer.sysinfo.user_cache import user_state

_NAME = "runs"
_KEPT_S = 30 * 86400.0
"""Seconds for which a link to a missing folder is kept: its file system may be mounted again."""


def remember(folder: Path) -> None:
    """Note a folder of run folders, so that `clipship runs` looks there. Does nothing if that fails."""
    state, path = user_state(_NAME), os.path.abspath(folder)
    if state is not None:
        with suppress(OSError):  # it is there already, or the folder is not writable
            state.mkdir(parents=True, mode=0o700, exist_ok=True)
            os.symlink(path, state / hashlib.sha256(os.fsencode(path)).hexdigest()[:16])


def known_folders() -> list[Path]:
    """Returns the folders that are still there, sorted."""
    state = user_state(_NAME)
    return [] if state is None or not state.is_dir() else sorted(_existing(state))


def _existing(state: Path) -> Iterator[Path]:
    for link in state.iterdir():
        with suppress(OSError):  # it is no link, or somebody else removed it
            target = Path(os.readlink(link))
            if target.is_dir():
                yield target
            elif time.time() - link.lstat().st_mtime > _KEPT_S:
                link.unlink()
