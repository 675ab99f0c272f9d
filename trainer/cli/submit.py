"""The command `clipship submit`. Imports no torch."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.near import NearChoice
from trainer.cli.options import job_argument, set_option
from trainer.config.schedulers import SCHEDULERS
from trainer.errors import InputError
from trainer.launch.schedulers import reachable, scheduler
from trainer.launch.submission import record, removed_if_refused
from trainer.run.known_folders import remember
from trainer.text.paste import word
from trainer.text.terminal import say

if TYPE_CHECKING:
    from trainer.config import Job


@click.command(
    epilog="""\b
Examples:
  clipship submit job.toml --to slurm
  clipship submit job.toml --to slurm --set resources.nodes=4 --set name=four-nodes
  clipship submit job.toml --to kubernetes"""
)
@job_argument
@click.option("--to", required=True, type=NearChoice(list(SCHEDULERS)), help="Scheduler that gets the job.")
@set_option
@click.option(
    "--no-check", is_flag=True, help="Do not check the data here, if only the cluster's nodes see it."
)
def command(job_path: Path, to: str, overrides: tuple[str, ...], no_check: bool) -> None:
    """Render JOB, put its files into its run folder and submit it. Only the job's id goes to stdout.

    After that, `clipship status RUN` shows its state, `clipship logs RUN` the output of its ranks, and
    `clipship cancel RUN` ends it.
    """
    from trainer.config.loader import load_job

    job = load_job(job_path, overrides)
    check_submission(job, to, data=not no_check)
    folder = submit(job, to)
    click.echo(f"submitted to {to}; next: clipship status {word(folder)}", err=True)


def check_submission(job: "Job", to: str, *, data: bool) -> None:
    """Raises InputError with every reason why the job cannot run there. Makes nothing and asks no cluster.

    `data` is False if this machine does not see the data. A scheduler whose ranks see other files than this
    machine checks them when they start.
    """
    from trainer.cli.check import check_job, problems_of
    from trainer.run.folder import check_run_folder

    place = scheduler(to)
    checks: list[Callable[[], object]] = [lambda: place.validate(job)]
    if place.same_files:
        checks.insert(0, lambda: check_job(job, job.resources.world_size) if data else check_run_folder(job))
    if problems := dict.fromkeys(line for text in problems_of(checks) for line in text.splitlines()):
        raise InputError("\n".join(problems))


def submit(job: "Job", to: str) -> Path:
    """Submit a job that has been checked, and print its id; returns the folder that keeps the record."""
    from trainer.cli.secret_values import secret_warnings

    control = reachable(to)
    try:
        with removed_if_refused([control.record_folder(job)]):
            folder = prepare(job, to)
            for warning in secret_warnings(job):
                say(f"warning: {warning}")
            submission = control.submit(job, folder)
            record(folder, submission)
    except OSError as problem:
        where = problem.filename or control.record_folder(job)
        raise InputError(
            f"{where}: {problem.strerror}; choose another folder with --set logging.runs=FOLDER"
        ) from None
    click.echo(submission.id)
    return folder


def prepare(job: "Job", to: str) -> Path:
    """Make the folder that keeps the record of the job's submission, with its artefacts; return it."""
    folder = scheduler(to).prepare(job)
    remember(folder.parent)
    return folder
