"""Folders of the user: for what can be made again, for what is remembered, and on the node's own disk."""

import os
import stat
import tempfile
from pathlib import Path

from trainer.safe_io.plain import is_own_folder

_NODE_DISKS = (Path("/var/tmp"), Path(tempfile.gettempdir()))
"""Folders of a node's own disk, in which every user may write. The first one mostly outlives a reboot."""


def user_cache(name: str) -> Path | None:
    """Returns Clipship's folder of this name in the user's cache; None if the user has none.

    It may not exist yet.
    """
    return _own_folder("XDG_CACHE_HOME", "~/.cache", name)


def user_state(name: str) -> Path | None:
    """Returns Clipship's folder of this name for what it remembers of the user; None if the user has none.

    It may not exist yet. Nothing fails without what is in it.
    """
    return _own_folder("XDG_STATE_HOME", "~/.local/state", name)


def _own_folder(variable: str, default: str, name: str) -> Path | None:
    folder = os.path.expanduser(os.environ.get(variable) or default)
    return Path(folder, "clipship", name) if os.path.isabs(folder) else None


def node_cache(name: str, disks: tuple[Path, ...] = _NODE_DISKS) -> Path | None:
    """Returns this user's folder of this name on the node's own disk, which other users cannot enter.

    It is made if it is missing. Others can write in /var/tmp and /tmp: a folder there that is not this user's
    own, or that others can enter, is passed over. Returns None if no disk has one.
    """
    for disk in disks:
        own = disk / f"clipship-{os.geteuid()}"
        try:
            own.mkdir(mode=0o700, exist_ok=True)
            if is_own_folder(own) and not stat.S_IMODE(own.lstat().st_mode) & 0o077:
                (own / name).mkdir(exist_ok=True)
                return own / name
        except OSError:  # read-only, full, or another user's
            continue
    return None
