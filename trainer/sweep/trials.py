"""The runs of a sweep: grid of values, names, states, starts and table of results. Imports no torch.

Every run that is neither done nor under way is started, and all of them are checked before the first one.
"""

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from trainer.config import Job
from trainer.config.loader import from_here, load_job
from trainer.config.schedulers import SCHEDULERS
from trainer.config.tables import toml_text
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, ClusterError, InputError
from trainer.launch import local
from trainer.launch.hosts import Host
from trainer.launch.schedulers import prepare, reachable, refused_if_unwritable, scheduler, settled, submit
from trainer.launch.submission import Outcome, announce, read_record, removed_if_refused
from trainer.plan.check import check_job, check_submission
from trainer.plan.describe import warnings
from trainer.report.folder import RunFacts, has_started, read_run
from trainer.report.wording import short_title, shown_metrics
from trainer.run.find import is_run
from trainer.run.folder import run_folder
from trainer.run.layout import RESULT_FILE
from trainer.run.sweep_record import SweepRecord, record_sweep, sweep_folder
from trainer.sysinfo.signals import SIGNALS
from trainer.text.paste import command as pasted
from trainer.text.table import aligned
from trainer.text.terminal import say, shown
from trainer.text.wording import many


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


def waiting(trials: Sequence[Trial]) -> list[Trial]:
    """Returns the runs that are neither done nor under way, and says what became of the others.

    Raises ClusterError if a scheduler that has got one of them does not answer.
    """
    left = [trial for trial in trials if trial.outcome() != "done"]
    if done := len(trials) - len(left):
        say(f"{many(done, 'run')} of {len(trials)} {'is' if done == 1 else 'are'} done already")
    return [trial for trial in left if not _is_under_way(trial)]


def submit_all(sweep: Sweep, trials: Sequence[Trial], to: str, *, data: bool, parallel: int | None) -> None:
    """Submit these runs of the sweep, after all have been checked; `data` is False if none is seen here.

    A scheduler that takes several jobs at once starts at most `parallel` of them at a time, and keeps what it
    needs in the sweep's folder. Raises InputError before the first run is submitted if any cannot work, and
    ClusterError if the scheduler does not answer.
    """
    samples = refuse(trials, lambda trial: check_submission(trial.job, to, data=data))
    _refuse_equal_names(trials, to)
    sweep.record()
    _warn(trials, (warnings(trial.job, its, to=to) for trial, its in zip(trials, samples, strict=True)))
    submitted = 0
    try:
        for _ in _submitted(trials, to, sweep.folder, parallel):
            submitted += 1
    finally:
        if submitted < len(trials):
            say(
                f"{many(submitted, 'run')} of {len(trials)} submitted before this problem; the same command "
                "goes on"
            )
    if trials:
        say(f"{many(submitted, 'run')} submitted to {to}; the command with --list shows what they reached")


def _submitted(trials: Sequence[Trial], to: str, folder: Path, parallel: int | None) -> Iterator[None]:
    """Submits the runs, and yields after each one."""
    if not SCHEDULERS[to].takes_several or len(trials) == 1:
        for trial in trials:
            submit(trial.job, to, ())
            yield
        return
    yield from _submitted_together([trial.job for trial in trials], to, folder, parallel)


def _submitted_together(jobs: Sequence[Job], to: str, folder: Path, parallel: int | None) -> Iterator[None]:
    """Submits the jobs to a scheduler that takes several at once, and yields after each one.

    Raises ClusterError at the end if a run that was submitted has no record.
    """
    place = scheduler(to)
    without_record = 0
    new = [place.record_folder(job) for job in jobs]
    with refused_if_unwritable(folder), removed_if_refused(new) as unknown:
        runs = [(job, prepare(job, to)) for job in settled(jobs, to)]
        for own, submission in place.submit_together(runs, folder, parallel):
            unknown.discard(own)
            try:
                announce(own, submission, place.ends(submission))
            except ClusterError as problem:  # the scheduler may have got the next ones, too
                without_record += 1
                say(str(problem))
            yield
    if without_record:
        raise ClusterError(
            f"{many(without_record, 'run')} of these {'has' if without_record == 1 else 'have'} no record, "
            "as said above: end them by those commands before the same command goes on"
        )


def _refuse_equal_names(trials: Sequence[Trial], to: str) -> None:
    """Raises InputError if two runs would have the same name on a scheduler that takes each name once."""
    place = scheduler(to)
    by_name: dict[str, str] = {}
    for trial in trials:
        if (name := place.unique_name(trial.job)) is None:
            continue
        if name in by_name:
            raise InputError(
                f"no run was started\n{by_name[name]} and {trial.name} would both be named {name} on {to}: "
                f"leave out {to}.name, or one of the two"
            )
        by_name[name] = trial.name


def _is_under_way(trial: Trial) -> bool:
    """Returns whether the run's scheduler still has it, and says so."""
    if trial.outcome() != "running" or (submission := read_record(trial.folder)) is None:
        return False
    again = pasted("clipship", "status", trial.folder)
    say(f"{trial.name} was submitted to {submission.to} as {submission.id}: `{again}`")
    return True


def refuse(trials: Sequence[Trial], check: Callable[[Trial], int | None]) -> list[int | None]:
    """Returns what `check` returns of each run. Raises InputError with the problems of all."""
    results, problems = [], []
    for trial in trials:
        try:
            results.append(check(trial))
        except InputError as problem:
            problems.append(f"{' '.join(trial.values)}: {problem}")
    if problems:
        raise InputError("no run was started\n" + "\n".join(problems))
    return results


def _warn(trials: Sequence[Trial], warnings_of_each: Iterable[Iterable[str]]) -> None:
    """Says each warning once; one that is not about all runs names the first of them."""
    named: dict[str, list[str]] = {}
    for trial, texts in zip(trials, warnings_of_each, strict=True):
        for text in texts:
            named.setdefault(text, []).append(trial.name)
    for text, names in named.items():
        some = "" if len(names) == len(trials) else f" ({many(len(names), 'run')}, such as {names[0]})"
        say(f"warning: {text}{some}")


_ASKED_TO_STOP = (EXIT_PREEMPTED, *(128 + number for number in SIGNALS))
"""Exit codes of a run that was asked to stop; no rank dies by such a signal, since ranks ignore them."""


def check(trials: Sequence[Trial], nproc: int | None, hosts: Sequence[Host] | None) -> None:
    """Says what is rarely meant. Raises InputError with the problems of every run that cannot start here."""
    samples = refuse(trials, lambda trial: check_job(trial.job, local.ranks_of(trial.job, nproc, hosts)))
    _warn(trials, (warnings(trial.job, its, local=True) for trial, its in zip(trials, samples, strict=True)))


def run_all(trials: Sequence[Trial], nproc: int | None, hosts: Sequence[Host] | None) -> int:
    """Runs one after the other; returns 0, 1 if any has failed, or the code of one that was asked to stop."""
    failed = []
    for number, trial in enumerate(trials, 1):
        say(f"run {number} of {len(trials)}: {trial.name} ({' '.join(trial.values)})")
        code = local.run(trial.job, nproc=nproc, hosts=hosts, began=time.time())
        if code in _ASKED_TO_STOP:
            say(f"the sweep ends at run {number} of {len(trials)}; the same command goes on with it")
            return code
        if code:
            failed.append(trial.name)
    if failed:
        say(f"{many(len(failed), 'run')} of {len(trials)} failed: {', '.join(failed)}")
    return EXIT_FAILED if failed else EXIT_DONE
