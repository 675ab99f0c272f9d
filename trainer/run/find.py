"""Tells which folders are runs, and which runs a mistyped name may mean. Imports no torch."""

import os
from collections.abc import Iterator
from pathlib import Path

from trainer.run.known_folders import known_folders
from trainer.run.layout import ARTEFACTS, EXIT_FILE, JOB_FILE, LOGS, START_FILE, SUBMISSION_FILE
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
