"""Whether the run folder can be made, and is not another job's; and how an old run makes room. Imports no torch."""

import os
from itertools import count
from pathlib import Path

from trainer.errors import InputError
from trainer.inputs.same_job import differences
from trainer.job import Job
from trainer.jobfile import load
from trainer.run_lock import LOCK, who_holds

JOB_FILE = "job.toml"
ARTEFACTS = "artefacts"
"""Folder in the run folder: what was rendered and submitted. It is there before a submitted run begins, and so is its first log."""
INDEX = "index"
"""Folder in the run folder: the index of shards beside which nothing can be written. It is made before the run."""
LEFT_BEFORE = frozenset({ARTEFACTS, INDEX, LOCK, "logs", "exit.json", "diagnosis.json", "flight-records"})
"""What there may be without a run: also what a start leaves that ended before it was one."""
_WAYS_ON = (
    "take another name with --set name=..., go on with the settings it was started with, or move that folder away "
    "(`clipship run --fresh` does)"
)


def run_folder(job: Job) -> Path:
    """Where the run writes: [logging] runs / the job's name."""
    return Path(job.logging.runs) / job.name


def check_run_folder(job: Job, *, fresh: bool = False) -> None:
    """Raises InputError where the folder cannot be written, or holds another job's run (the first keys that differ are named).

    `fresh`: it will be set aside, and made anew.
    """
    folder = run_folder(job)
    if fresh or not os.path.lexists(folder):
        _check_writable(folder.parent)
    elif not folder.is_dir():
        raise InputError(f"run folder {folder} is a file: remove it, or take another name with --set name=...")
    else:
        _check_writable(folder)
        _check_same_job(job, folder)


def move_aside(folder: Path) -> Path:
    """Rename a run folder to the first free `NAME.old-1`, `NAME.old-2`, ...; returns its new place.

    Raises InputError where a start of the run still writes it, or it is not this user's to rename.
    """
    if holder := who_holds(folder):
        raise InputError(f"{folder} cannot be set aside: it is written by {holder}. End that start of the run first")
    number = next(number for number in count(1) if not folder.with_name(f"{folder.name}.old-{number}").exists())
    try:
        return folder.rename(folder.with_name(f"{folder.name}.old-{number}"))
    except OSError as problem:
        raise InputError(f"{folder} cannot be set aside: {problem.strerror}; take another name with --set name=...") from None


def _check_writable(folder: Path) -> None:
    """Looks at the nearest folder that exists: the others are made by the run."""
    existing = next((parent for parent in (folder, *folder.parents) if os.path.lexists(parent)), folder)
    if not existing.is_dir():
        raise InputError(f"run folder: {existing} is a file, so {folder} cannot be made: change it with --set logging.runs=...")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"run folder: no permission to write in {existing}: take another folder with --set logging.runs=...")


def _check_same_job(job: Job, folder: Path) -> None:
    file = folder / JOB_FILE
    if not file.exists():
        if {name for name in os.listdir(folder) if not name.startswith(".")} - LEFT_BEFORE:
            raise InputError(f"run folder {folder} holds files but no {JOB_FILE}, so it is no run: {_WAYS_ON}")
        return
    try:
        before = load(file)
    except InputError as problem:
        raise InputError(f"run folder {folder} holds a run whose job cannot be read: {_WAYS_ON}\n{problem}") from None
    found = list(differences(before.model_dump(), job.model_dump()))
    if found:
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise InputError(f"run folder {folder} holds another job's run: {'; '.join(found[:3])}{more}; {_WAYS_ON}")
