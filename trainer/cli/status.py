"""The command `clipship status`. Imports no torch."""

from pathlib import Path

import click

from trainer.cli.options import Command, json_option, run_argument
from trainer.cli.output import print_json, print_lines
from trainer.errors import EXIT_DONE, EXIT_FAILED, ClusterError
from trainer.launch.schedulers import find_submission, reachable
from trainer.text.table import by_topic
from trainer.text.terminal import shown


@click.command(cls=Command)
@run_argument
@click.option("--wide", is_flag=True, help="Show every metric, and a line for each cause of lost time.")
@json_option("Print one JSON object instead of the table.")
def command(run: str, wide: bool, as_json: bool) -> int:
    """Show the state of RUN, from its scheduler and its run folder: step, speed, time left, last checkpoint.

    Also the share of its time in steps that counted, and what the rest was lost to. For a run that
    died: when, why, and the command that resumes it.

    RUN is a run folder, a job file, or the name of a run in ./runs; submitted, or started here. Exit code 1:
    its scheduler does not answer.

    The object of --json has run and state: none (no rank has started), starting, alive, quiet (silent for
    longer than usual), dead or ended; done, last_sign (seconds since the epoch), step, steps, epoch (from
    0), loss, samples_per_s, left_s, evaluation, checkpoint (step, path), copies (to, step, behind, failed),
    taken_s, gpu_hours, energy_j, useful_share, lost_s (cause -> seconds), reading (requests, bytes, wait_s,
    cache_hits of all ranks), restarts, end (exit_code, reason, rank, node, time) and remarks. What is not
    known is null. A run that was submitted also has scheduler: its name, its id and its answer.

    Examples:
      clipship status runs/first-run
      clipship status job.toml
      clipship status runs/first-run --wide
      clipship status runs/first-run --json
    """
    from trainer.report.progress import progress, state_of

    folder, submission = find_submission(run)
    rows, unknown = [], None
    if submission:
        try:
            rows = reachable(submission.to).status(folder, submission)
        except ClusterError as problem:
            unknown = problem
            rows = [("state", f"unknown: {problem}")]
    if as_json:
        asked = {"name": submission.to, "id": submission.id, "answer": dict(rows)} if submission else None
        print_json({"run": str(folder), **state_of(folder), **({"scheduler": asked} if asked else {})})
        return EXIT_DONE if unknown is None else EXIT_FAILED
    to = submission.to if submission else None
    # A scheduler reports the step only if this machine does not see the run folder.
    own = [] if any(topic == "step" for topic, _ in rows) else progress(folder, job_name(run), to, wide=wide)
    print_lines(map(shown, by_topic([("run", str(folder)), *rows, *own])))
    return EXIT_DONE if unknown is None else EXIT_FAILED


def job_name(run: str) -> str:
    """Returns the job file as the user calls it; JOB if the run was named by its folder."""
    return run if Path(run).is_file() else "JOB"
