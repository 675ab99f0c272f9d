"""The commands `clipship render KIND JOB`: what a job becomes, as text. Pure: the same job file gives the same bytes. Imports no torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_job_argument: Decorator = click.argument("job_path", metavar="JOB", type=click.Path(path_type=Path))
_set_option: Decorator = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the job file, e.g. optim.lr=1e-3; an empty value takes the default. May be repeated.",
)


@click.group(
    epilog="""\b
Examples:
  clipship render slurm job.toml > train.sbatch"""
)
def command() -> None:
    """Print what a job file becomes. Nothing is asked of a cluster, and the text on stdout is all there is."""


@command.command()
@_job_argument
@_set_option
def slurm(job_path: Path, overrides: tuple[str, ...]) -> None:
    """The batch script for sbatch."""
    from trainer import jobfile
    from trainer.launch.slurm.script import batch_script

    click.echo(batch_script(jobfile.load(job_path, overrides)), nl=False)
