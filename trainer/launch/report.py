"""The command `clipship report`. Imports no torch."""

from pathlib import Path

import click


@click.command(
    epilog="""\b
Examples:
  clipship report runs/first-run
  clipship report runs/first-run --output first-run.html"""
)
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--output", metavar="FILE", type=click.Path(path_type=Path), help="Where to write the page; without it, RUN/report.html.")
def command(run_folder: Path, output: Path | None) -> None:
    """Write one HTML page about the run in folder RUN, finished or not.

    Loss, speed, evaluation over time, environment, what went wrong. The page loads nothing from anywhere: send it as it is. Its path goes
    to stdout.
    """
    from trainer.report.page import write_report

    click.echo(write_report(run_folder, output))
