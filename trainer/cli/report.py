"""The command `clipship report`. Imports no torch."""

from pathlib import Path

import click

from trainer.cli.options import run_argument


@click.command(
    epilog="""\b
Examples:
  clipship report runs/first-run
  clipship report runs/first-run --output first-run.html"""
)
@run_argument
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File that gets the page; without it, RUN/report.html.",
)
def command(run: str, output: Path | None) -> None:
    """Write one HTML page about RUN, finished or not.

    RUN is a run folder, a job file, or the name of a run in ./runs. The page shows loss, speed, evaluation
    over time, the time of the run by cause, its restarts, the environment and what went wrong. It loads
    nothing from elsewhere, so it can be sent as it is. Its path goes to stdout.
    """
    from trainer.launch.submission import find_run
    from trainer.report.page import write_report

    click.echo(write_report(find_run(run), output))
