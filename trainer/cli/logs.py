"""The command `clipship logs`. Imports no torch."""

import sys
from pathlib import Path

import click

from trainer.cli.options import Command, run_argument
from trainer.launch.schedulers import find_submission, reachable
from trainer.run.exit_files import last_exit
from trainer.sysinfo.streams import reader_is_gone
from trainer.text.fitting import fit_to
from trainer.text.paste import word
from trainer.text.terminal import shown


@click.command(cls=Command)
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Keep showing new lines until the run has ended.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Show only the lines of this rank.")
def command(run: str, follow: bool, rank: int | None) -> None:
    """Show the output of RUN's ranks in the order of time, each line with the ranks that wrote it.

    RUN is a run folder, a job file, or the name of a run in ./runs.

    Examples:
      clipship logs runs/first-run
      clipship logs -f --rank 3 runs/first-run
    """
    from trainer.launch.logfiles import log_lines
    from trainer.report.liveness import is_dead

    folder, submission = find_submission(run)
    lines = reachable(submission.to).log_lines(folder, submission, rank, follow) if submission else None
    for line in lines if lines is not None else log_lines(folder, rank, follow=follow):
        sys.stdout.write(shown(line) + "\n")
        sys.stdout.flush()
        if reader_is_gone(sys.stdout):
            return
    if cause := _cause(folder):
        click.echo(fit_to(sys.stderr, shown(cause)), err=True)
    elif lines is None and is_dead(folder):
        click.echo(
            f"clipship: the run has died: `clipship status {word(run)}` says when, why, and how to resume it",
            err=True,
        )


def _cause(folder: Path) -> str:
    """Returns why the run's last start failed; "" if it did not, or has not ended.

    A rank that was killed could not write it into its log, which ends with what others noticed.
    """
    record = last_exit(folder)
    return record.headline() if record is not None and record.exit_code else ""
