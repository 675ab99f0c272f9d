"""Starts the runs of a sweep: here or over ssh one after the other, or on a scheduler. Imports no torch.

Every run that is neither done nor under way is started, and all of them are checked before the first one.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from trainer.config import Job
from trainer.config.schedulers import SCHEDULERS
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, ClusterError, InputError
from trainer.launch import local
from trainer.launch.hosts import Host
from trainer.launch.schedulers import prepare, refused_if_unwritable, scheduler, settled, submit
from trainer.launch.submission import announce, read_record, removed_if_refused
from trainer.plan.check import check_job, check_submission
from trainer.plan.describe import warnings
from trainer.sweep.trials import Sweep, Trial
from trainer.sysinfo.signals import SIGNALS
from trainer.text.paste import command as pasted
from trainer.text.terminal import say
from trainer.text.wording import many


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
