"""`clipship image`: build, verify and publish the container image of a job."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from trainer.job import Job

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_job_argument: Decorator = click.argument("job_path", metavar="JOB", type=click.Path(path_type=Path))
_set_option: Decorator = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the job file. May be repeated."
)


@click.group(
    epilog="""\b
Examples:
  clipship image build job.toml
  clipship image verify clipship/train:0.1"""
)
def command() -> None:
    """Build, prove and publish the container image of a job."""


def _load(job_path: Path, overrides: tuple[str, ...]) -> "Job":
    from trainer import jobfile

    return jobfile.load(job_path, overrides)


@command.command()
@_job_argument
@_set_option
@click.option("--any-disk", is_flag=True, help="Do not look whether the daemon's disk has room.")
def build(job_path: Path, overrides: tuple[str, ...], any_disk: bool) -> None:
    """Build JOB's image with the local Docker daemon; prints its id."""
    from trainer.launch.image.build import build as build_image

    click.echo(build_image(_load(job_path, overrides), any_disk=any_disk))


@command.command()
@_job_argument
@click.argument("folder", type=click.Path(path_type=Path))
@_set_option
def context(job_path: Path, folder: Path, overrides: tuple[str, ...]) -> None:
    """Write all that JOB's image is built from to FOLDER, its Dockerfile too, for a builder of your own."""
    from trainer.launch.image import context as contexts

    contexts.write_folder(contexts.context(_load(job_path, overrides)), folder)
    print(f"wrote {folder}; for example: docker build {folder}", file=sys.stderr)
