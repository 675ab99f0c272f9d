"""The command `clipship cancel`. Imports no torch."""

import click

from trainer.cli.options import Command, run_argument
from trainer.errors import InputError
from trainer.launch.schedulers import find_submission, reachable
from trainer.text.terminal import shown


@click.command(cls=Command)
@run_argument
def command(run: str) -> None:
    """End RUN, which was submitted: its ranks are asked to save first, and nothing starts it again.

    RUN is a run folder, a job file, or the name of a run in ./runs.

    Examples:
      clipship cancel runs/first-run
      clipship cancel job.toml
    """
    folder, submission = find_submission(run)
    if submission is None:
        raise InputError(
            f"the run in {folder} was not submitted: press Ctrl-C where `clipship run` runs, or send that "
            "process SIGTERM"
        )
    click.echo(shown(reachable(submission.to).cancel(folder, submission)), err=True)
