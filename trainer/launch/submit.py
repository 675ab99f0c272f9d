"""The command `clipship submit`. Imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.errors import InputError
from trainer.inputs.run_folder import ARTEFACTS
from trainer.launch.options import job_argument, set_option
from trainer.launch.submission import SCHEDULERS, record, scheduler

if TYPE_CHECKING:
    from trainer.job import Job


@click.command(
    epilog="""\b
Examples:
  clipship submit job.toml --to slurm
  clipship submit job.toml --to slurm --set resources.nodes=4 --set name=four-nodes
  clipship submit job.toml --to kubernetes"""
)
@job_argument
@click.option("--to", required=True, type=click.Choice(SCHEDULERS), help="Where to.")
@set_option
@click.option("--no-check", is_flag=True, help="Do not look at the data here: only the cluster's nodes see it.")
def command(job_path: Path, to: str, overrides: tuple[str, ...], no_check: bool) -> None:
    """Render JOB, put what it needs into its run folder and submit it. The job's id alone goes to stdout.

    `clipship status RUN` then says how it is doing, `clipship logs RUN` what its ranks say, `clipship cancel RUN` ends it.
    """
    from trainer import jobfile

    job = jobfile.load(job_path, overrides)
    folder = getattr(scheduler(to), "prepare", _prepare)(job, not no_check)
    try:
        submission = scheduler(to).submit(job, folder)
        record(folder, submission)
    except OSError as problem:
        raise InputError(
            f"{problem.filename or folder}: {problem.strerror}; choose another folder with --set logging.runs=FOLDER"
        ) from None
    click.echo(submission.id)
    click.echo(f"submitted to {to}; next: clipship status {folder}", err=True)


def _prepare(job: "Job", look: bool) -> Path:
    """The job's run folder, made, with its folder of artefacts; `look`: at the data too.

    A scheduler whose ranks see other files than this machine has a `prepare` of its own.
    """
    from trainer import inputs
    from trainer.inputs import run_folder

    if look:
        inputs.check(job, job.resources.world_size)
    else:
        inputs.check_run_folder(job)
    folder = run_folder(job)
    try:
        (folder / ARTEFACTS).mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"run folder {folder} cannot be made: {problem.strerror}; choose another with --set logging.runs=FOLDER") from None
    return folder
