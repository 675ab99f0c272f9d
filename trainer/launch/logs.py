"""The command `clipship logs`. Imports no torch."""

import sys

import click

from trainer.launch.submission import find_submission, scheduler


@click.command(
    epilog="""\b
Examples:
  clipship logs runs/first-run
  clipship logs -f --rank 3 runs/first-run"""
)
@click.argument("run", metavar="RUN")
@click.option("-f", "--follow", is_flag=True, help="Go on as the ranks do, until the run has ended.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Of this rank alone.")
def command(run: str, follow: bool, rank: int | None) -> None:
    """Show what the ranks of RUN said, in the order of time, each line with its rank.

    RUN is a run folder, a job file, or the name of a run in ./runs.
    """
    from trainer.launch.logfiles import log_lines

    folder, submission = find_submission(run)
    lines = scheduler(submission.to).log_lines(folder, submission, rank, follow) if submission else None
    for line in lines if lines is not None else log_lines(folder, rank, follow=follow):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
