"""The command `clipship submit`. Imports no torch."""

from pathlib import Path

import click

from trainer.cli.options import Command, NearChoice, job_argument, set_option
from trainer.config.schedulers import SCHEDULERS
from trainer.text.paste import word


@click.command(cls=Command)
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

    Examples:
      clipship submit job.toml --to slurm
      clipship submit job.toml --to slurm --set resources.nodes=4 --set name=four-nodes
      clipship submit job.toml --to kubernetes
    """
    from trainer.config.loader import load_job
    from trainer.launch.schedulers import submit
    from trainer.plan.check import check_submission
    from trainer.plan.describe import warnings

    job = load_job(job_path, overrides)
    samples = check_submission(job, to, data=not no_check)
    folder = submit(job, to, warnings(job, samples, to=to))
    click.echo(f"submitted to {to}; next: clipship status {word(folder)}", err=True)
