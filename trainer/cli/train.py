"""The command `clipship train`: one rank, which a launcher starts. What it starts imports torch."""

from pathlib import Path

import click

from trainer.cli.options import Command, job_argument, set_option


@click.command(cls=Command)
@job_argument
@set_option
def command(job_path: Path, overrides: tuple[str, ...]) -> int:
    """Run one rank of JOB; a launcher starts it once for each rank.

    Examples:
      torchrun --nproc-per-node 4 --no-python clipship train job.toml
      srun clipship train job.toml
    """
    from trainer.train.main import main as run_rank  # the one import that brings torch

    return run_rank(job_path, overrides)
