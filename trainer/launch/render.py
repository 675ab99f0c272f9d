"""`clipship render KIND JOB`: what would be built or submitted, as text on stdout. Pure: no daemon, no cluster, no clock, no torch."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainer.launch.options import job_argument, set_option

if TYPE_CHECKING:
    from trainer.job import Job

KINDS = {
    "dockerfile": ("trainer.launch.image.dockerfile:dockerfile", "The container image's Dockerfile."),
    "apptainer": ("trainer.launch.image.apptainer:definition", "The definition file for Apptainer, and what enroot is told."),
    "slurm": ("trainer.launch.slurm.script:batch_script", "The batch script for sbatch."),
    "kubernetes": ("trainer.launch.kubernetes.manifest:manifest", "The MPIJob and the ConfigMap that `kubectl apply` takes."),
}
"""What can be rendered: kind -> ("module:function" from a job to its text, its line in `clipship render --help`)."""
WARNINGS = {"kubernetes": "trainer.launch.kubernetes.fits:warnings"}
"""Who says what is allowed and seldom meant: kind -> "module:function" from a job to sentences."""


class _Kinds(click.Group):
    """A command for each of KINDS; the module is imported when its command is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(KINDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command(cmd_name) if cmd_name in KINDS else None


@click.group(
    cls=_Kinds,
    epilog="""\b
Examples:
  clipship render dockerfile job.toml
  clipship render slurm job.toml > train.sbatch
  clipship render kubernetes job.toml | kubectl apply -f -""",
)
def command() -> None:
    """Print what JOB would build or submit, and nothing else."""


def _command(kind: str) -> click.Command:
    place, summary = KINDS[kind]

    @click.command(name=kind, help=summary)
    @job_argument
    @set_option
    def render(job_path: Path, overrides: tuple[str, ...]) -> None:
        from trainer import jobfile

        job = jobfile.load(job_path, overrides)
        click.echo(_function(place)(job), nl=False)
        for text in _function(WARNINGS[kind])(job) if kind in WARNINGS else ():
            click.echo(f"clipship: warning: {text}", err=True)

    return render


def _function(place: str) -> "Callable[[Job], Any]":
    module, _, name = place.partition(":")
    function: Callable[[Job], Any] = getattr(importlib.import_module(module), name)
    return function
