"""The command `clipship checkpoint`: asks a run to save now. Imports no torch."""

import click

from trainer.cli.options import Command, run_argument
from trainer.errors import InputError
from trainer.launch.submission import find_run
from trainer.run.layout import (
    CHECKPOINT_REQUEST,
    CHECKPOINTS,
    EXIT_FILE,
    JOB_FILE,
    LOGS,
    RESULT_FILE,
    rank_log,
)
from trainer.run.lock import who_holds


@click.command(cls=Command)
@run_argument
def command(run: str) -> None:
    """Ask RUN to save a checkpoint now and to go on.

    RUN is a run folder, a job file, or the name of a run in ./runs.

    Examples:
      clipship checkpoint runs/first-run
    """
    run_folder = find_run(run)
    if not (run_folder / JOB_FILE).is_file():
        raise InputError(f"{run_folder} is not a run folder: it has no job.toml")
    if (run_folder / RESULT_FILE).exists():
        raise InputError(
            f"the run in {run_folder} has ended; its checkpoints are in {run_folder / CHECKPOINTS}"
        )
    if (run_folder / EXIT_FILE).exists() and who_holds(run_folder) is None:
        raise InputError(
            f"the run in {run_folder} is not running: `clipship status` says how its last start ended"
        )
    try:
        (run_folder / CHECKPOINT_REQUEST).touch()
    except OSError as problem:
        raise InputError(
            f"{run_folder}: the request cannot be written there: {problem.strerror}; does the run belong to "
            "another user?"
        ) from None
    click.echo(
        f"requested; the log names the checkpoint once it is written: {run_folder / LOGS / rank_log(0)}",
        err=True,
    )
