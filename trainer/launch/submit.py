"""Submits a job: makes its folder, gives it to the scheduler, keeps the record. Imports no torch."""

from collections.abc import Iterable
from pathlib import Path

from trainer.config import Job
from trainer.config.schedulers import SCHEDULERS
from trainer.errors import InputError
from trainer.launch.submission import make_artefacts_folder, record, removed_if_refused, scheduler
from trainer.run.folder import run_folder
from trainer.run.known_folders import remember
from trainer.sysinfo.imports import load
from trainer.text.terminal import say


def record_folder(job: Job, to: str) -> Path:
    """Returns the folder that keeps the record of the job's submission, whether it exists or not."""
    row = SCHEDULERS[to]
    return Path(load(row.record_folder)(job)) if row.record_folder else run_folder(job)


def submit(job: Job, to: str, warnings: Iterable[str]) -> Path:
    """Submit a job that has been checked, and print its id; returns the folder that keeps the record.

    The warnings are said before the scheduler gets the job.
    """
    control = scheduler(to)
    try:
        with removed_if_refused([record_folder(job, to)]):
            folder = prepare(job, to)
            for warning in warnings:
                say(f"warning: {warning}")
            submission = control.submit(job, folder)
            record(folder, submission)
    except OSError as problem:
        where = problem.filename or record_folder(job, to)
        raise InputError(
            f"{where}: {problem.strerror}; choose another folder with --set logging.runs=FOLDER"
        ) from None
    print(submission.id, flush=True)
    return folder


def prepare(job: Job, to: str) -> Path:
    """Make the folder that keeps the record of the job's submission, with its artefacts; return it."""
    if place := SCHEDULERS[to].prepare:
        folder = Path(load(place)(job))
    else:
        folder = run_folder(job)
        make_artefacts_folder(folder, "choose another folder with --set logging.runs=FOLDER")
    remember(folder.parent)
    return folder
