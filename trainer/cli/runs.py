"""The command `clipship runs`: a line for each run of this user, wherever it runs. Imports no torch."""

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from trainer.cli.options import Command, json_option
from trainer.cli.output import print_json
from trainer.errors import EXIT_DONE, EXIT_PREEMPTED, ClusterError, InputError
from trainer.launch.logfiles import last_message
from trainer.launch.schedulers import reachable
from trainer.launch.submission import Submission, read_record
from trainer.report.progress import state_of
from trainer.report.wording import short_title, shown_metrics
from trainer.run.find import HERE, is_run, known_folders, remember
from trainer.text.table import aligned, without, without_column
from trainer.text.terminal import shown
from trainer.text.wording import duration

_WORDS = {"alive": "running", "none": "not begun"}
_ENDED = {EXIT_DONE: "done", EXIT_PREEMPTED: "stopped"}
_TITLES = ("run", "where", "state", "step", "evaluation", "samples/s", "left", "last")
_LEAST_WANTED = ("samples/s", "where", "evaluation", "left", "last")
"""Columns that a narrow terminal loses, in this order."""
_AT_ONCE = 8
"""Runs that are looked at together: a scheduler may answer slowly."""


@click.command(cls=Command)
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[FOLDER]...")
@click.option("--wide", is_flag=True, help="Show every metric, and all columns in a narrow terminal, too.")
@json_option("Print one JSON object: the fields of `clipship status --json` for each run, and last_line.")
def command(folders: tuple[Path, ...], wide: bool, as_json: bool) -> None:
    """List runs: place, state, step, last evaluation, speed, time left, and the last line of the log.

    Without FOLDER, these are your own runs in ./runs and in all other folders in which you started or
    submitted runs from this account. FOLDER is what a job file calls logging.runs; all runs in it are listed,
    and it is looked at later, too. The newest run comes first. One that was submitted and has not ended is
    asked for at its scheduler.

    Examples:
      clipship runs
      clipship runs runs /scratch/me/runs
      clipship runs --wide
      clipship runs --json
    """
    for folder in folders:
        if not folder.is_dir():
            raise InputError(
                f"{folder} is not a folder: give a folder of run folders, as logging.runs names it"
            )
        remember(folder)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        runs = list(threads.map(_about, _all_runs(folders) if folders else _own_runs()))
    runs.sort(key=lambda run: run.get("last_sign") or 0.0, reverse=True)
    if as_json:
        print_json({"runs": runs})
        return
    if not runs:
        where = ", ".join(map(str, folders)) or "./runs, and none of yours elsewhere"
        click.echo(f"no run in {where}", err=True)
        return
    table = [list(_TITLES), *([*map(shown, _fields(run, time.time(), wide=wide))] for run in runs)]
    if not any(run.get("evaluation") for run in runs):
        table = without_column(table, "evaluation")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() and not wide else 0
    for line in aligned(without(table, _LEAST_WANTED, width), width):
        click.echo(line)


def _all_runs(folders: Iterable[Path]) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.glob("*")) if is_run(path)]


def _own_runs() -> list[Path]:
    """Returns this user's run folders; root's are all. A folder that is known by two names counts once."""
    user = os.geteuid()
    by_place: dict[Path, Path] = {}
    for path in _all_runs((HERE, *known_folders())):
        if user in (0, path.stat().st_uid):
            by_place.setdefault(path.resolve(), path)
    return list(by_place.values())


def _about(folder: Path) -> dict[str, Any]:
    """Returns the fields of `state_of`, with `run`, `where`, `last_line` and the scheduler's word for it."""
    about: dict[str, Any] = {"run": str(folder), "where": "here", "last_line": last_message(folder)}
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
        return reachable(submission.to).status(folder, submission)[0][1]
    except (ClusterError, InputError) as problem:
        return f"unknown: {problem}"


def _fields(run: Mapping[str, Any], now: float, *, wide: bool) -> Iterator[str]:
    yield _name(Path(run["run"]))
    yield run["where"]
    yield _state(run)
    steps = f"/{run['steps']:,}" if run.get("steps") else ""
    yield f"{run['step']:,}{steps}" if run.get("step") is not None else "-"
    measured = shown_metrics(run.get("evaluation") or {}, wide=wide)
    yield ", ".join(f"{short_title(name)} {text}" for name, text in measured.items()) or "-"
    yield f"{run['samples_per_s']:,.0f}" if run.get("samples_per_s") else "-"
    yield duration(run["left_s"]) if run.get("left_s") is not None else "-"
    ago = f"{duration(max(0.0, now - run['last_sign']))} ago" if run.get("last_sign") else ""
    yield ": ".join(filter(None, (ago, _last(run).partition("\n")[0])))


def _name(folder: Path) -> str:
    """Returns the shortest text by which a command run here finds the folder."""
    if folder.parent == HERE:
        return folder.name
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)


def _state(run: Mapping[str, Any]) -> str:
    if run.get("done"):
        return "done"
    if run["state"] == "ended":
        code = (run.get("end") or {}).get("exit_code", -1)
        return _ENDED.get(code if isinstance(code, int) else -1, f"failed ({code})")
    return _WORDS.get(state := str(run["state"]), state)


def _last(run: Mapping[str, Any]) -> str:
    """Returns why the run cannot go on, else what its scheduler and its log said last."""
    reason = None if run.get("done") else (run.get("end") or {}).get("reason")
    if why := run.get("problem") or reason:
        return str(why)
    return ": ".join(str(run[name]) for name in ("scheduler_state", "last_line") if run.get(name))
