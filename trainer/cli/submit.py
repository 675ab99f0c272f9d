"""The command `clipship submit`. Imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.options import job_argument, set_option
from trainer.config.schedulers import SCHEDULERS
from trainer.errors import InputError
from trainer.launch.submission import make_artefacts_folder, record, scheduler
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
@click.option("--to", required=True, type=click.Choice(list(SCHEDULERS)), help="Scheduler that gets the job.")
@set_option
@click.option(
    "--no-check", is_flag=True, help="Do not check the data here, if only the cluster's nodes see it."
)
def command(job_path: Path, to: str, overrides: tuple[str, ...], no_check: bool) -> None:
    """Render JOB, put its files into its run folder and submit it. Only the job's id goes to stdout.

    After that, `clipship status RUN` shows its state, `clipship logs RUN` the output of its ranks, and
    `clipship cancel RUN` ends it.
    """
    from trainer.cli.secret_values import secret_warnings
    from trainer.config.loader import load_job

    job = load_job(job_path, overrides)
    folder = getattr(scheduler(to), "prepare", _prepare)(job, not no_check)
    for warning in secret_warnings(job):
        say(f"warning: {warning}")
    try:
        submission = scheduler(to).submit(job, folder)
        record(folder, submission)
    except OSError as problem:
        raise InputError(
            f"{problem.filename or folder}: {problem.strerror}; choose another folder with --set "
            "logging.runs=FOLDER"
        ) from None
    click.echo(submission.id)
    click.echo(f"submitted to {to}; next: clipship status {word(folder)}", err=True)


def _prepare(job: "Job", check: bool) -> Path:
    """Make the job's run folder with its folder of artefacts, and return it.

    With `check`, also check the data. A scheduler whose ranks see other files than this machine has a
    `prepare` of its own.
    """
    from trainer.cli.check import check_job
    from trainer.run.folder import check_run_folder, run_folder

    if check:
        check_job(job, job.resources.world_size)
    else:
        check_run_folder(job)
    folder = run_folder(job)
    make_artefacts_folder(folder, "choose another folder with --set logging.runs=FOLDER")
    return folder
