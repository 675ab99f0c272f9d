"""A sweep on a scheduler: each run that is neither done nor under way is submitted. Imports no torch."""

from collections.abc import Sequence

from trainer.cli.submit import check_submission, submit
from trainer.cli.sweep.checks import refuse
from trainer.cli.sweep.trials import Trial
from trainer.config.schedulers import SCHEDULERS
from trainer.errors import InputError
from trainer.launch.submission import read_record
from trainer.sysinfo.imports import load
from trainer.text.paste import command as pasted
from trainer.text.terminal import say
from trainer.text.wording import many


def submit_all(trials: Sequence[Trial], to: str, *, data: bool) -> None:
    """Submit the runs, after all of them have been checked; `data` is False if this machine sees none.

    A run that its scheduler still has is left alone. Raises InputError before the first run is submitted if
    any cannot work, and ClusterError if the scheduler does not answer.
    """
    waiting = [trial for trial in trials if not _is_under_way(trial)]
    refuse(waiting, lambda trial: check_submission(trial.job, to, data=data))
    _refuse_equal_names(waiting, to)
    submitted = 0
    try:
        for trial in waiting:
            submit(trial.job, to)
            submitted += 1
    finally:
        if submitted < len(waiting):
            say(
                f"{many(submitted, 'run')} of {len(waiting)} submitted before this problem; the same command "
                "goes on"
            )
    if waiting:
        say(f"{many(submitted, 'run')} submitted to {to}; the command with --list shows what they reached")


def _refuse_equal_names(trials: Sequence[Trial], to: str) -> None:
    """Raises InputError if two runs would have the same name on a scheduler that takes each name once."""
    if (place := SCHEDULERS[to].unique_name) is None:
        return
    by_name: dict[str, str] = {}
    for trial in trials:
        name = load(place)(trial.job)
        if name in by_name:
            raise InputError(
                f"no run was started\n{by_name[name]} and {trial.name} would both be named {name} on {to}: "
                f"leave out {to}.name, or one of the two"
            )
        by_name[name] = trial.name


def _is_under_way(trial: Trial) -> bool:
    """Returns whether the run's scheduler still has it, and says so."""
    if trial.outcome() != "running" or (record := read_record(trial.folder)) is None:
        return False
    again = pasted("clipship", "status", trial.folder)
    say(f"{trial.name} was submitted to {record.to} as {record.id}: `{again}`")
    return True
