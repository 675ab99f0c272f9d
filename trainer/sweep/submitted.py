"""A sweep on a scheduler: each run that is neither done nor under way is submitted. Imports no torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from trainer.config.schedulers import SCHEDULERS
from trainer.errors import InputError
from trainer.launch.schedulers import prepare, scheduler, submit
from trainer.launch.submission import read_record, record, removed_if_refused
from trainer.plan.check import check_submission
from trainer.plan.secret_values import secret_warnings
from trainer.sweep.checks import refuse
from trainer.sweep.trials import Sweep, Trial
from trainer.text.paste import command as pasted
from trainer.text.terminal import say
from trainer.text.wording import many


def submit_all(sweep: Sweep, trials: Sequence[Trial], to: str, *, data: bool, parallel: int | None) -> None:
    """Submit these runs of the sweep, after all have been checked; `data` is False if none is seen here.

    A run that its scheduler still has is left alone. A scheduler that takes several jobs at once starts at
    most `parallel` of them at a time, and keeps what it needs in the sweep's folder. Raises InputError before
    the first run is submitted if any cannot work, and ClusterError if the scheduler does not answer.
    """
    waiting = [trial for trial in trials if not _is_under_way(trial)]
    refuse(waiting, lambda trial: check_submission(trial.job, to, data=data))
    _refuse_equal_names(waiting, to)
    sweep.record()
    submitted = 0
    try:
        for _ in _submitted(waiting, to, sweep.folder, parallel):
            submitted += 1
    finally:
        if submitted < len(waiting):
            say(
                f"{many(submitted, 'run')} of {len(waiting)} submitted before this problem; the same command "
                "goes on"
            )
    if waiting:
        say(f"{many(submitted, 'run')} submitted to {to}; the command with --list shows what they reached")


def _submitted(trials: Sequence[Trial], to: str, folder: Path, parallel: int | None) -> Iterator[None]:
    """Submits the runs, and yields after each one."""
    if not SCHEDULERS[to].takes_several or len(trials) == 1:
        for trial in trials:
            submit(trial.job, to, secret_warnings(trial.job))
            yield
        return
    for warning in dict.fromkeys(warning for trial in trials for warning in secret_warnings(trial.job)):
        say(f"warning: {warning}")
    place = scheduler(to)
    with removed_if_refused([place.record_folder(trial.job) for trial in trials]):
        runs = [(trial.job, prepare(trial.job, to)) for trial in trials]
        for own, submission in place.submit_together(runs, folder, parallel):
            record(own, submission)
            click.echo(submission.id)
            yield


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
