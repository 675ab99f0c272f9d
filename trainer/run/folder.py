"""Checks that the run folder can be made and is not another job's, and moves an old run aside.

Imports no torch.
"""

import os
from itertools import count
from pathlib import Path

from trainer.config import Job
from trainer.config.loader import load_job
from trainer.config.resume_rule import differences
from trainer.errors import InputError
from trainer.run.layout import (
    GOODPUT_FILE,
    JOB_FILE,
    LEFT_BEFORE,
    LOCK,
    METRICS_FILE,
    RANK_STATS_FILE,
    RESULT_FILE,
    SERVICE_ID_FILES,
    Run,
    rank_logs,
)
from trainer.run.lock import who_holds
from trainer.safe_io.plain import is_plain
from trainer.text.paste import word

_REMEDIES = (
    "choose another name with --set name=..., continue with the settings that it was started with, or move "
    "that folder away (`clipship run --fresh` does)"
)

_FILES = (JOB_FILE, RESULT_FILE, *SERVICE_ID_FILES, LOCK, METRICS_FILE, RANK_STATS_FILE, GOODPUT_FILE)
"""Files of the run folder that a start reads or adds to, beside the logs."""


def run_folder(job: Job) -> Path:
    """Returns the folder that the run writes: `logging.runs` / the job's name."""
    return Path(job.logging.runs) / job.name


def not_written(folder: Path, error: OSError) -> str:
    """Returns the message for a run folder that cannot be written."""
    return (
        f"the run folder {folder} cannot be written: {error}. Choose another with --set logging.runs=FOLDER"
    )


def done_text(run: Run, job: Job) -> str:
    """Returns what is said of a run that is done if it is started again without being asked for more."""
    longer = "" if job.stage else "--longer goes on with it, "
    return f"{run.result}: this run is done; {longer}--fresh moves it aside and starts again"


def is_done(job: Job) -> bool:
    """Returns whether the job's run is done and the job asks for nothing more.

    A job that may go on beyond its length is not looked at where what it asks for depends on its data. Nor is
    a result that cannot be read, which the ranks name.
    """
    steps = job.optim.steps if job.checkpoint.longer else 0
    if steps is None or (steps and job.stage):
        return False
    try:
        return Run(run_folder(job)).finished_as_asked(job.checkpoint.resume, steps)
    except InputError:
        return False


def check_run_folder(job: Job, *, fresh: bool = False) -> None:
    """Raises InputError if the folder cannot be written, or holds another job's run.

    The first keys that differ are named. A run that did no step may be taken over. With `fresh`, the folder
    will be moved aside and made anew, so its content does not matter.
    """
    folder = run_folder(job)
    if fresh or not os.path.lexists(folder):
        check_writable_folder(folder.parent)
    elif not folder.is_dir():
        raise InputError(
            f"run folder {folder} is a file: remove it, or choose another name with --set name=..."
        )
    else:
        check_writable_folder(folder)
        _check_plain(folder)
        _check_same_job(job, folder)


def used_again(job: Job) -> str:
    """Returns a sentence if the job takes over the folder of another job's run that did no step, else ""."""
    folder = run_folder(job)
    try:
        before = load_job(folder / JOB_FILE)
    except InputError:
        return ""
    if not never_trained(folder) or not list(differences(before.model_dump(), job.model_dump())):
        return ""
    return f"{folder} has a run of another job that did no step: this one takes its place"


def never_trained(folder: Path) -> bool:
    """Returns whether a run began in the folder, is over, and has no step and no checkpoint to lose."""
    run = Run(folder)
    kept = any(run.checkpoints.glob("*")) or run.result.exists()
    steps = run.metrics.exists() and run.metrics.stat().st_size > 0
    return run.logs.is_dir() and not kept and not steps and who_holds(folder) is None


def move_aside(folder: Path) -> Path:
    """Rename a run folder to the first free `NAME.old-1`, `NAME.old-2`, ...; returns its new path.

    Raises InputError if a start of the run still writes it, or if this user may not rename it.
    """
    if holder := who_holds(folder):
        raise InputError(
            f"{folder} cannot be moved aside: {holder} is writing to it. Stop that start of the run first."
        )
    number = next(
        number for number in count(1) if not folder.with_name(f"{folder.name}.old-{number}").exists()
    )
    try:
        return folder.rename(folder.with_name(f"{folder.name}.old-{number}"))
    except OSError as problem:
        raise InputError(
            f"{folder} cannot be moved aside: {problem.strerror}; choose another name with --set name=..."
        ) from None


def check_writable_folder(folder: Path, what: str = "run folder", key: str = "logging.runs") -> None:
    """Raises InputError if the nearest existing folder on the path is a file or not writable.

    The run makes the missing folders. `what` is the folder for, and `key` names it.
    """
    existing = next((parent for parent in (folder, *folder.parents) if os.path.lexists(parent)), folder)
    choose = f"choose another folder with --set {key}=..."
    if not existing.is_dir():
        raise InputError(f"{what}: {existing} is a file, so {folder} cannot be made: {choose}")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"{what}: no permission to write in {existing}: {choose}")


def _check_plain(folder: Path) -> None:
    """Raises InputError for a file that a start reads or adds to, and that it could not."""
    logs = (path for _, path in rank_logs(folder))
    for path in (*(folder / name for name in _FILES), *logs):
        if os.path.lexists(path) and not is_plain(path):
            raise InputError(f"{path} is a link or no file, which no run leaves there: remove it first")


def _check_same_job(job: Job, folder: Path) -> None:
    file = folder / JOB_FILE
    if not file.exists():
        if {name for name in os.listdir(folder) if not name.startswith(".")} - LEFT_BEFORE:
            raise InputError(
                f"run folder {folder} contains files but no {JOB_FILE}, so it is not a run: {_REMEDIES}"
            )
        return
    try:
        before = load_job(file)
    except InputError as problem:
        raise InputError(
            f"run folder {folder} contains a run whose job cannot be read: {_REMEDIES}\n{problem}"
        ) from None
    changed = list(differences(before.model_dump(), job.model_dump()))
    if changed and not never_trained(folder):
        other_length = _other_length(before, job, folder)
        more = f"; and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise InputError(
            f"run folder {folder} contains the run of another job: "
            f"{'; '.join(changed[:3])}{more}; {other_length}{_REMEDIES}"
        )


def _other_length(before: Job, now: Job, folder: Path) -> str:
    """Returns how to go on to each of both lengths, if nothing but the length differs; else ""."""
    checkpoint = now.checkpoint.model_copy(update={"longer": True})
    lengthened = now.model_copy(update={"checkpoint": checkpoint})
    if any(differences(before.model_dump(), lengthened.model_dump())):
        return ""
    unit = "epochs" if now.optim.steps is None else "steps"
    earlier, wanted = getattr(before.optim, unit), getattr(now.optim, unit)
    option = "shorter" if earlier is not None and wanted < earlier else "longer"
    return (
        f"to go on to the length that it has: clipship resume {word(folder)}; to this one: give --{option} "
        f"{unit}={wanted}; or "
    )
