"""The command `clipship report`. Imports no torch."""

from pathlib import Path

import click


@click.command(
    epilog="""\b
Examples:
  clipship report runs/first-run
  clipship report runs/first-run --output first-run.html"""
)
@click.argument("run", metavar="RUN")
@click.option("--output", metavar="FILE", type=click.Path(path_type=Path), help="Where to write the page; without it, RUN/report.html.")
def command(run: str, output: Path | None) -> None:
    """Write one HTML page about RUN - a run folder, a job file, or a name in ./runs -, finished or not.

    Loss, speed, evaluation over time, environment, what went wrong. The page loads nothing from anywhere: send it as it is. Its path goes
    to stdout.
    """
    from trainer.launch.submission import find_run
    from trainer.report.page import write_report

    click.echo(write_report(find_run(run), output))
