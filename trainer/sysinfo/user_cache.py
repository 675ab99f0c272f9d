"""Folders of the user: for what can be made again, for what is remembered, and on the node's own disk."""

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from trainer.safe_io.folders import make_private
from trainer.safe_io.plain import is_own_folder


def _node_disks() -> Iterator[Path]:
    """Yields folders of a node's own disk, in which every user may write; the first mostly outlives a reboot.

    Python looks for its folder for temporary files where TMPDIR is now. Raises OSError if there is none.
    """
    yield Path("/var/tmp")
    yield Path(tempfile.gettempdir())


def user_cache(name: str) -> Path | None:
    """Returns Clipship's folder of this name in the user's cache; None if the user has none of their own.

    It may not exist yet. Others cannot write in it.
    """
    return _own_folder("XDG_CACHE_HOME", "~/.cache", name)


def user_state(name: str) -> Path | None:
    """Returns Clipship's folder of this name for what it remembers of the user; None if the user has none.

    It may not exist yet. Nothing fails without what is in it.
    """
    return _own_folder("XDG_STATE_HOME", "~/.local/state", name)


def _own_folder(variable: str, default: str, name: str) -> Path | None:
    given = os.environ.get(variable)
    folder = Path(os.path.expanduser(given or default))
    if not folder.is_absolute() or (not given and not os.path.isdir(os.path.expanduser("~"))):
        return None
    own = folder / "clipship" / name
    with suppress(OSError):  # it is not there yet, or cannot be
        if not is_own_folder(own) or stat.S_IMODE(own.lstat().st_mode) & 0o022:
            return None
    return own


def node_cache(name: str, disks: Iterable[Path] | None = None) -> Path | None:
    """Returns this user's folder of this name on the node's own disk, which other users cannot enter.

    It is made if it is missing. Others can write in /var/tmp and /tmp: a folder there that is not this user's
    own, or that others can enter, is passed over. Returns None if no disk has one.
    """
    with suppress(OSError):  # there is no folder for temporary files
        for disk in _node_disks() if disks is None else disks:
            with suppress(OSError):  # read-only, full, or another user's
                folder = private_folder(disk) / name
                folder.mkdir(exist_ok=True)
                return folder
    return None


def private_folder(place: Path) -> Path:
    """Returns this user's folder in a place where others may write, which others cannot enter.

    It is made if it is missing. Raises OSError if that fails, or if another user has made it or can enter it.
    """
    return make_private(place / f"clipship-{os.geteuid()}")
