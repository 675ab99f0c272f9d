"""The runs of a sweep: grid of values, names, states and table of results. Imports no torch."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from trainer.config import Job
from trainer.config.loader import load_job
from trainer.config.overrides import toml_text
from trainer.config.typed import from_here
from trainer.errors import ClusterError, InputError
from trainer.launch.schedulers import reachable, scheduler
from trainer.launch.submission import Outcome, read_record
from trainer.report.folder import RunFacts, has_started, read_run
from trainer.report.wording import short_title, shown_metrics
from trainer.run.find import is_run
from trainer.run.folder import run_folder
from trainer.run.layout import RESULT_FILE
from trainer.run.sweep_record import SweepRecord, record_sweep, sweep_folder
from trainer.text.table import aligned
from trainer.text.terminal import shown


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    name: str
    values: tuple[str, ...]
    job: Job
    folder: Path
    """Run folder; the folder with the record of its submission if this machine does not see that one."""

    def outcome(self) -> Outcome | None:
        """Returns how far it got; None if it was never started, or if only its folder says so.

        Raises ClusterError if it was submitted and its scheduler does not answer.
        """
        if (self.folder / RESULT_FILE).exists():
            return "done"
        record = read_record(self.folder)
        return reachable(record.to).outcome(self.folder, record) if record else None


@dataclass(frozen=True)
class Sweep:
    """The runs of a grid."""

    job: str
    """Name of the job without the values of a run."""
    trials: Sequence[Trial]

    @property
    def folder(self) -> Path:
        """Folder of the job's sweeps, beside those of the runs."""
        return sweep_folder(self.trials[0].folder.parent, self.job)

    def record(self) -> None:
        """Add the runs to the record of the job's sweeps, from which the report is made."""
        values = {trial.name: dict(value.split("=", 1) for value in trial.values) for trial in self.trials}
        record_sweep(self.folder, SweepRecord(self.job, values))


def find_sweep(job_path: Path, overrides: Sequence[str], grids: Sequence[str], to: str | None) -> Sweep:
    """Returns the runs of the grid with the folders that they have, or will have once submitted to `to`."""
    rows, base = combinations(grids), load_job(job_path, overrides).name
    trials = []
    for name, values in zip(names(base, rows), rows, strict=True):
        job = load_job(job_path, (*overrides, *from_here(values), f"name={toml_text(name)}"))
        trials.append(Trial(name, values, job, _folder(job, to)))
    return Sweep(base, trials)


def _folder(job: Job, to: str | None) -> Path:
    """Returns where the run or its record is; without `to`, it may have been submitted to any scheduler."""
    if to is not None:
        return scheduler(to).record_folder(job)
    own = run_folder(job)
    folders = (own, *(scheduler(name).record_folder(job) for name in job.schedulers))
    return next(filter(is_run, folders), own)


def show(trials: Sequence[Trial], *, wide: bool = False) -> None:
    """Print the table: name, values, state, loss and the last evaluation of each run; `wide`: all of it."""
    rows = [dict(_row(trial, wide=wide)) for trial in trials]
    titles = list(dict.fromkeys(title for row in rows for title in row))
    for line in aligned([titles, *([row.get(title, "-") for title in titles] for row in rows)]):
        click.echo(line)


def _row(trial: Trial, *, wide: bool) -> Iterator[tuple[str, str]]:
    yield "run", shown(trial.name)
    for override in trial.values:
        key, _, value = override.partition("=")
        yield shown(key), shown(value)
    if not has_started(trial.folder):
        yield "state", shown(_state_elsewhere(trial))
        return
    facts = read_run(trial.folder)
    yield "state", _state_here(facts)
    yield from _reached(facts, wide=wide)


def _state_elsewhere(trial: Trial) -> str:
    """Returns what the scheduler calls the state of a run that has written nothing that is seen here."""
    try:
        record = read_record(trial.folder)
        return scheduler(record.to).status(trial.folder, record)[0][1] if record else "not begun"
    except (ClusterError, InputError) as problem:
        return f"unknown: {problem}"


def _state_here(facts: RunFacts) -> str:
    if facts.result.get("reason") == "done":
        return "done"
    return f"ended with {facts.exit['exit_code']}" if "exit_code" in facts.exit else "begun"


def _reached(facts: RunFacts, *, wide: bool) -> Iterator[tuple[str, str]]:
    if facts.metrics.records:
        last = facts.metrics.records[-1]
        yield "step", f"{last['step']:,}"
        yield "loss", f"{last['loss']:.4f}"
    for evaluation in facts.metrics.evaluations[-1:]:
        for name, text in shown_metrics(evaluation, wide=wide).items():
            yield shown(short_title(name)), text


MOST = 500
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.+_-]+")


def combinations(grids: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the overrides of each run: every value of a key with every value of the others.

    Each text is KEY=VALUE,VALUE,...; the first key changes slowest. Raises InputError for what is no grid.
    """
    columns: dict[str, list[str]] = {}
    for grid in grids:
        key, equals, values = grid.partition("=")
        key = key.strip()
        if not key or not equals:
            raise InputError(f"--grid {grid}: give KEY=VALUE,VALUE,..., e.g. --grid optim.lr=1e-4,3e-4")
        if key in columns:
            raise InputError(f"--grid {key} is given twice: list all of its values in one --grid")
        if key in ("name", "logging.runs"):
            raise InputError(f"--grid {key}: each run has a folder of its own, named after its values")
        columns[key] = _values(key, values)
    count = 1
    for values_of_key in columns.values():
        count *= len(values_of_key)
    if count > MOST:
        raise InputError(f"the grid has {count:,} runs, more than {MOST}: sweep a part of it")
    return [
        tuple(f"{key}={value}" for key, value in zip(columns, row, strict=True))
        for row in itertools.product(*columns.values())
    ]


def names(job: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a name for the run of each row: the job's, then each key's last part and value.

    Raises InputError if two runs would share a folder.
    """
    found = ["-".join([job, *(_part(override) for override in row)]) for row in rows]
    if len(set(found)) < len(found):
        found = ["-".join([job, *(_NOT_IN_NAMES.sub("-", override) for override in row)]) for row in rows]
    twice = {name for name in found if found.count(name) > 1}
    if twice:
        raise InputError(f"two runs of the grid would be named {min(twice)}: leave equal values out")
    return found


def _part(override: str) -> str:
    key, _, value = override.partition("=")
    return _NOT_IN_NAMES.sub("-", f"{key.rpartition('.')[2]}-{value}").strip("-")


def _values(key: str, text: str) -> list[str]:
    """Returns the values between commas outside of brackets and quotes."""
    values, quote, depth = [""], "", 0
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        else:
            depth += (char in "[{") - (char in "]}")
        if char == "," and not quote and depth == 0:
            values.append("")
        else:
            values[-1] += char
    values = [value.strip() for value in values]
    if quote or depth or not all(values):
        raise InputError(
            f"--grid {key}={text}: a value between two commas is missing, or a bracket or quote is open"
        )
    return values
