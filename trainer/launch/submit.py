"""Submits a job: makes its folder, gives it to the scheduler, keeps the record. Imports no torch."""

from collections.abc import Iterable
from pathlib import Path

from trainer.config import Job
from trainer.errors import InputError
from trainer.launch.schedulers import reachable, scheduler
from trainer.launch.submission import record, removed_if_refused
from trainer.run.known_folders import remember
from trainer.text.terminal import say


def submit(job: Job, to: str, warnings: Iterable[str]) -> Path:
    """Submit a job that has been checked, and print its id; returns the folder that keeps the record.

    The warnings are said before the scheduler gets the job.
    """
    control = reachable(to)
    try:
        with removed_if_refused([control.record_folder(job)]):
            folder = prepare(job, to)
            for warning in warnings:
                say(f"warning: {warning}")
            submission = control.submit(job, folder)
            record(folder, submission)
    except OSError as problem:
        where = problem.filename or control.record_folder(job)
        raise InputError(
            f"{where}: {problem.strerror}; choose another folder with --set logging.runs=FOLDER"
        ) from None
    print(submission.id, flush=True)
    return folder


def prepare(job: Job, to: str) -> Path:
    """Make the folder that keeps the record of the job's submission, with its artefacts; return it."""
    folder = scheduler(to).prepare(job)
    remember(folder.parent)
    return folder
