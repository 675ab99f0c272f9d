"""The command `clipship render KIND JOB`: prints the text that would be built or submitted.

Pure: it uses no daemon, no cluster, no clock and no torch.
"""

from pathlib import Path

import click

from trainer.cli.options import NearGroup, job_argument, set_option
from trainer.config.schedulers import SCHEDULERS
from trainer.sysinfo.imports import load
from trainer.text.terminal import say

_SECRETS = "trainer.plan.secret_values:secret_warnings"
_IMAGE_KINDS = {
    "dockerfile": ("trainer.image.dockerfile:dockerfile", "The container image's Dockerfile."),
    "apptainer": (
        "trainer.image.apptainer:definition",
        "The definition file for Apptainer, with the commands for enroot.",
    ),
}
KINDS = _IMAGE_KINDS | {row.name: (row.render, row.rendered) for row in SCHEDULERS.values()}
"""Texts that can be rendered: kind -> ("module:function" from a job to its text, its line in `clipship render
--help`)."""


class _Kinds(NearGroup):
    """A group with one command for each of KINDS, whose module is imported when it is run."""

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
    """Print the text that JOB would build or submit, and nothing else."""


def _command(kind: str) -> click.Command:
    place, summary = KINDS[kind]

    @click.command(name=kind, help=summary)
    @job_argument
    @set_option
    def render(job_path: Path, overrides: tuple[str, ...]) -> None:
        from trainer.config.loader import load_job

        job = load_job(job_path, overrides)
        click.echo(load(place)(job), nl=False)
        if row := SCHEDULERS.get(kind):
            for warnings in (row.warnings, _SECRETS):
                for text in load(warnings)(job) if warnings else ():
                    say(f"warning: {text}")

    return render
