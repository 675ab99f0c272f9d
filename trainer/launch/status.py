"""The command `clipship status`. Imports no torch."""

import click

from trainer.errors import EXIT_DONE, EXIT_FAILED, ClusterError
from trainer.launch.submission import find_submission, scheduler


@click.command(
    epilog="""\b
Examples:
  clipship status runs/first-run
  clipship status job.toml"""
)
@click.argument("run", metavar="RUN")
def command(run: str) -> int:
    """Say how RUN is doing: what its scheduler knows, and what the run folder does: step, speed, time left, last checkpoint.

    RUN is a run folder, a job file, or the name of a run in ./runs; submitted, or started here. Exit code 1: its scheduler does not answer.
    """
    from trainer.launch.progress import progress

    folder, submission = find_submission(run)
    rows, unknown = [], None
    if submission:
        try:
            rows = scheduler(submission.to).status(folder, submission)
        except ClusterError as problem:
            unknown = problem
            rows = [("state", f"unknown: {problem}")]
    own = [] if any(topic == "step" for topic, _ in rows) else progress(folder)  # a scheduler that knows the step does not see the folder
    for topic, text in [("run", str(folder)), *rows, *own]:
        click.echo(f"{topic:<12}{text}")
    return EXIT_DONE if unknown is None else EXIT_FAILED
