"""The command `clipship sweep`: a run for each combination of values, with a table at the end. No torch."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.grid import combinations, names
from trainer.cli.options import given_hosts, hosts_option, job_argument, nproc_option, set_option
from trainer.config.schedulers import SCHEDULERS
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, InputError
from trainer.report.folder import read_run
from trainer.run.layout import RESULT_FILE
from trainer.text.paste import command as pasted
from trainer.text.table import aligned
from trainer.text.terminal import say, shown
from trainer.text.wording import many

if TYPE_CHECKING:
    from trainer.config import Job
    from trainer.launch.hosts import Host

_ASKED_TO_STOP = (EXIT_PREEMPTED, EXIT_INTERRUPTED)


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    name: str
    values: tuple[str, ...]
    overrides: tuple[str, ...]
    """Values, --set and the name, as `load_job` takes them."""
    job: "Job"
    folder: Path

    def is_done(self) -> bool:
        """Returns whether it has reached its last step."""
        return (self.folder / RESULT_FILE).exists()


@click.command(
    epilog="""\b
Examples:
  clipship sweep job.toml --grid optim.lr=1e-4,3e-4 --grid seed=0,1
  clipship sweep job.toml --grid optim.lr=1e-4,3e-4 --nproc 2 --set optim.steps=200
  clipship sweep job.toml --grid model.name=ViT-B-32,ViT-B-16 --to slurm
  clipship sweep job.toml --grid optim.lr=1e-4,3e-4 --list"""
)
@job_argument
@click.option(
    "--grid",
    "grids",
    multiple=True,
    required=True,
    metavar="KEY=VALUE,VALUE,...",
    help="Values of a key of the job file; each with each of the other grids. May be repeated.",
)
@set_option
@nproc_option
@hosts_option
@click.option("--to", type=click.Choice(list(SCHEDULERS)), help="Submit all runs to this scheduler.")
@click.option("--list", "only_list", is_flag=True, help="Start nothing: show the runs and what they reached.")
@click.pass_context
def command(
    context: click.Context,
    job_path: Path,
    grids: tuple[str, ...],
    overrides: tuple[str, ...],
    nproc: int | None,
    hosts: str | None,
    to: str | None,
    only_list: bool,
) -> int:
    """Train JOB once for each combination of values, one run after the other here, or submit all of them.

    Each run has a folder named after JOB and its values. Every job is checked before the first one starts. A
    sweep that is started again goes on: runs that are done are left as they are. A run that fails does not
    end the sweep.
    """
    if to is not None and (nproc is not None or hosts is not None):
        raise InputError("give either --to, or --nproc or --hosts: a scheduler starts the ranks itself")
    named_hosts = given_hosts(nproc, hosts)
    trials = _trials(job_path, overrides, grids)
    if only_list:
        _show(trials)
        return EXIT_DONE
    waiting = [trial for trial in trials if not trial.is_done()]
    if done := len(trials) - len(waiting):
        say(f"{many(done, 'run')} of {len(trials)} {'is' if done == 1 else 'are'} done already")
    if to is not None:
        return _submit(context, job_path, waiting, to)
    _check(waiting, nproc, named_hosts)
    code = _run(job_path, waiting, nproc, named_hosts)
    _show(trials)
    _say_how_to_compare([trial.folder for trial in trials if trial.is_done()])
    return code


def _say_how_to_compare(done: Sequence[Path]) -> None:
    from trainer.report.compare import MOST_RUNS

    if len(done) > 1:
        say(f"compare them: {pasted('clipship', 'report', *done[:MOST_RUNS])}")


def _trials(job_path: Path, overrides: Sequence[str], grids: Sequence[str]) -> list[Trial]:
    from trainer.config.loader import load_job
    from trainer.run.folder import run_folder

    rows = combinations(grids)
    trials = []
    for name, values in zip(names(load_job(job_path, overrides).name, rows), rows, strict=True):
        all_overrides = (*overrides, *values, f"name={name}")
        job = load_job(job_path, all_overrides)
        trials.append(Trial(name, values, all_overrides, job, run_folder(job)))
    return trials


def _check(trials: Sequence[Trial], nproc: int | None, hosts: "Sequence[Host] | None") -> None:
    """Raises InputError with the problems of every run that cannot start."""
    from trainer.cli.check import check_job
    from trainer.launch.local import ranks_of

    problems = []
    for trial in trials:
        try:
            check_job(trial.job, ranks_of(trial.job, nproc, hosts))
        except InputError as problem:
            problems.append(f"{' '.join(trial.values)}: {problem}")
    if problems:
        raise InputError("no run was started\n" + "\n".join(problems))


def _run(job_path: Path, trials: Sequence[Trial], nproc: int | None, hosts: "Sequence[Host] | None") -> int:
    """Runs one after the other; returns 0, 1 if any has failed, or the code of one that was asked to stop."""
    from trainer.launch import local

    failed = []
    for number, trial in enumerate(trials, 1):
        say(f"run {number} of {len(trials)}: {trial.name} ({' '.join(trial.values)})")
        code = local.run(job_path, trial.job, trial.overrides, nproc=nproc, hosts=hosts, began=time.time())
        if code in _ASKED_TO_STOP:
            say(f"the sweep ends at run {number} of {len(trials)}; the same command goes on with it")
            return code
        if code:
            failed.append(trial.name)
    if failed:
        say(f"{many(len(failed), 'run')} of {len(trials)} failed: {', '.join(failed)}")
    return EXIT_FAILED if failed else EXIT_DONE


def _submit(context: click.Context, job_path: Path, trials: Sequence[Trial], to: str) -> int:
    from trainer.cli import submit
    from trainer.launch.submission import read_record

    for trial in trials:
        if (record := read_record(trial.folder)) is not None:
            again = pasted("clipship", "status", trial.folder)
            say(f"{trial.name} was submitted to {record.to} as {record.id}: `{again}`")
            continue
        context.invoke(submit.command, job_path=job_path, to=to, overrides=trial.overrides, no_check=False)
    return EXIT_DONE


def _show(trials: Sequence[Trial]) -> None:
    """Prints the table: name, values, state, loss and the last evaluation of each run."""
    rows = [dict(_row(trial)) for trial in trials]
    titles = list(dict.fromkeys(title for row in rows for title in row))
    for line in aligned([titles, *([row.get(title, "-") for title in titles] for row in rows)]):
        click.echo(line)


def _row(trial: Trial) -> Iterator[tuple[str, str]]:
    yield "run", shown(trial.name)
    for override in trial.values:
        key, _, value = override.partition("=")
        yield shown(key), shown(value)
    try:
        facts = read_run(trial.folder)
    except InputError:
        yield "state", "not begun"
        return
    ended = f"ended with {facts.exit['exit_code']}" if "exit_code" in facts.exit else "begun"
    yield "state", "done" if trial.is_done() else ended
    if facts.metrics.records:
        last = facts.metrics.records[-1]
        yield "step", f"{last['step']:,}"
        yield "loss", f"{last['loss']:.4f}"
    for metric, reached in facts.metrics.evaluations[-1].items() if facts.metrics.evaluations else ():
        if metric not in ("step", "generation") and not metric.endswith("_samples"):
            yield shown(metric), f"{reached:g}"
