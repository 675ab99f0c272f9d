"""The user's cache folder. Imports nothing of this project."""

import os
from pathlib import Path


def user_cache(name: str) -> Path | None:
    """Returns Clipship's folder of this name in the user's cache; None if the user has none.

    It may not exist yet.
    """
    folder = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(folder, "clipship", name) if os.path.isabs(folder) else None
