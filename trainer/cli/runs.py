"""The command `clipship runs`: a line for each run below some folders, wherever it runs. Imports no torch."""

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from trainer.cli.json_output import json_option, print_json
from trainer.cli.status_json import state_of
from trainer.errors import EXIT_DONE, EXIT_PREEMPTED, ClusterError, InputError
from trainer.launch.submission import Submission, is_run, read_record, scheduler
from trainer.text.table import aligned
from trainer.text.terminal import shown
from trainer.text.wording import duration

_WORDS = {"alive": "running", "none": "not begun"}
_ENDED = {EXIT_DONE: "done", EXIT_PREEMPTED: "stopped"}
_TITLES = ("run", "where", "state", "step", "samples/s", "left", "last")


@click.command(
    epilog="""\b
Examples:
  clipship runs
  clipship runs runs /scratch/me/runs
  clipship runs --json"""
)
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[FOLDER]...")
@json_option("Print one JSON object: the fields of `clipship status --json` for each run.")
def command(folders: tuple[Path, ...], as_json: bool) -> None:
    """List the runs in each FOLDER, ./runs by default: where, state, step, speed, time left, last word.

    The newest comes first. FOLDER is what a job file calls logging.runs. A run that was submitted and has not
    ended is asked for at its scheduler.
    """
    for folder in folders:
        if not folder.is_dir():
            raise InputError(
                f"{folder} is not a folder: give a folder of run folders, as logging.runs names it"
            )
    found = [path for folder in folders or (Path("runs"),) for path in folder.glob("*") if is_run(path)]
    runs = sorted(map(_about, found), key=lambda run: run.get("last_sign") or 0.0, reverse=True)
    if as_json:
        print_json({"runs": runs})
        return
    if not runs:
        click.echo(f"no run in {', '.join(map(str, folders)) or './runs'}", err=True)
        return
    table = [_TITLES, *(tuple(map(shown, _fields(run, time.time()))) for run in runs)]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for line in aligned(table, width):
        click.echo(line)


def _about(folder: Path) -> dict[str, Any]:
    """Returns the fields of `state_of`, with `run`, `where` and what the scheduler calls the run's state."""
    about: dict[str, Any] = {"run": str(folder), "where": "here"}
    try:
        submission = read_record(folder)
        if submission:
            about["where"] = f"{submission.to} {submission.id}"
        about |= state_of(folder)
        if submission and not about.get("end"):
            about["scheduler_state"] = _asked(folder, submission)
    except InputError as problem:
        return about | {"state": "unreadable", "problem": str(problem)}
    return about


def _asked(folder: Path, submission: Submission) -> str:
    try:
        return scheduler(submission.to).status(folder, submission)[0][1]
    except (ClusterError, InputError) as problem:
        return f"unknown: {problem}"


def _fields(run: Mapping[str, Any], now: float) -> Iterator[str]:
    end = run.get("end") or {}
    yield Path(run["run"]).name
    yield run["where"]
    yield _state(run, end)
    steps = f"/{run['steps']:,}" if run.get("steps") else ""
    yield f"{run['step']:,}{steps}" if run.get("step") is not None else "-"
    yield f"{run['samples_per_s']:,.0f}" if run.get("samples_per_s") else "-"
    yield duration(run["left_s"]) if run.get("left_s") is not None else "-"
    ago = f"{duration(max(0.0, now - run['last_sign']))} ago" if run.get("last_sign") else ""
    said = run.get("problem") or run.get("scheduler_state") or end.get("reason") or ""
    yield ": ".join(filter(None, (ago, str(said).partition("\n")[0])))


def _state(run: Mapping[str, Any], end: Mapping[str, Any]) -> str:
    if run.get("done"):
        return "done"
    if run["state"] == "ended":
        return _ENDED.get(end.get("exit_code", -1), f"failed ({end.get('exit_code')})")
    return _WORDS.get(state := str(run["state"]), state)
