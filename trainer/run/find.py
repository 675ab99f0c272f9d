"""Tells which folders are runs, and which runs a mistyped name may mean. Imports no torch."""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainer.run.layout import ARTEFACTS, EXIT_FILE, JOB_FILE, LOGS, START_FILE, SUBMISSION_FILE
from trainer.sysinfo.user_cache import user_state
from trainer.text.near import meant, near

HERE = Path("runs")
"""Folder in which the name of a run is looked for."""


def is_run(folder: Path) -> bool:
    """Returns whether a run was submitted or started in the folder."""
    names = (JOB_FILE, EXIT_FILE, LOGS, START_FILE, f"{ARTEFACTS}/{SUBMISSION_FILE}")
    return any(os.path.exists(folder / name) for name in names)  # False where this user may not look, too


def run_hint(given: str) -> str:
    """Returns `; did you mean ...?` with runs that have a name or path near to this one; "" for none.

    They are looked for beside a path that was given, in ./runs, and by the same name in the other folders in
    which this user started runs.
    """
    path = Path(given)
    beside = [str(path.parent / name) for name in _near(path.name, path.parent)] if path.parent.name else []
    elsewhere = [str(run) for folder in known_folders() for run in _runs(folder) if run.name == path.name]
    return meant(beside or _near(path.name, HERE) or elsewhere)


def _near(name: str, folder: Path) -> list[str]:
    return near(name, (run.name for run in _runs(folder)))


def _runs(folder: Path) -> Iterator[Path]:
    return filter(is_run, sorted(folder.glob("*")))


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
