"""The command `clipship render KIND JOB`: prints the text that would be built or submitted.

Pure: it uses no daemon, no cluster, no clock and no torch. Only slurm.image_dir is looked into: the script
names the file that is there; and, for a warning, the cache of weights.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.options import NearGroup, job_argument, set_option
from trainer.config.schedulers import SCHEDULERS
from trainer.text.terminal import say
from trainer.text.wording import many

if TYPE_CHECKING:
    from trainer.config import Job


def _dockerfile(job: "Job") -> str:
    from trainer.image.dockerfile import dockerfile

    return dockerfile(job)


def _apptainer(job: "Job") -> str:
    from trainer.image.apptainer import definition

    return definition(job)


_IMAGES: dict[str, tuple[Callable[["Job"], str], str]] = {
    "dockerfile": (_dockerfile, "The container image's Dockerfile."),
    "apptainer": (_apptainer, "The definition file for Apptainer, with the commands for enroot."),
}
"""Texts of images: kind -> (function from a job to its text, its line in `clipship render --help`)."""
KINDS = (*_IMAGES, *SCHEDULERS)
"""All texts that can be rendered."""


class _Kinds(NearGroup):
    """A group with one command for each of KINDS, whose module is imported when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(KINDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command(cmd_name) if cmd_name in KINDS else None


@click.group(cls=_Kinds)
def command() -> None:
    """Print the text that JOB would build or submit, and nothing else.

    Examples:
      clipship render dockerfile job.toml
      clipship render slurm job.toml > train.sbatch
      clipship render kubernetes job.toml | kubectl apply -f -
    """


def _command(kind: str) -> click.Command:
    summary = _IMAGES[kind][1] if kind in _IMAGES else SCHEDULERS[kind].rendered

    @click.command(name=kind, help=summary)
    @job_argument
    @set_option
    def render(job_path: Path, overrides: tuple[str, ...]) -> None:
        from trainer.config.loader import load_job
        from trainer.launch.schedulers import scheduler, settled
        from trainer.plan.hub_parts import not_fetched
        from trainer.plan.secret_values import secret_warnings

        job = load_job(job_path, overrides)
        if kind in _IMAGES:
            _print(_IMAGES[kind][0](job))
            return
        place = scheduler(kind)
        [job] = settled([job], kind)
        _print(place.render(job))
        asked = job.resources
        if kind not in job.model_fields_set and "resources" not in job.model_fields_set:
            say(
                f"warning: the job has neither [{kind}] nor [resources], so this asks for "
                f"{many(asked.nodes, 'node')} with {many(asked.ranks_per_node, 'GPU')} and the defaults of "
                f"[{kind}], which `clipship explain {kind}` lists"
            )
        for text in (*place.warnings(job), *not_fetched(job), *secret_warnings(job)):
            say(f"warning: {text}")

    return render


def _print(text: str) -> None:
    """Prints the text in UTF-8, as files have it, whatever the terminal's encoding is."""
    click.echo(text.encode(errors="surrogateescape"), nl=False)
