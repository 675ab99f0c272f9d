"""A sweep on this machine or over ssh: one run after the other. Imports no torch."""

import time
from collections.abc import Sequence

from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED
from trainer.launch import local
from trainer.launch.hosts import Host
from trainer.plan.check import check_job
from trainer.sweep.checks import refuse
from trainer.sweep.trials import Trial
from trainer.text.terminal import say
from trainer.text.wording import many

_ASKED_TO_STOP = (EXIT_PREEMPTED, EXIT_INTERRUPTED)


def check(trials: Sequence[Trial], nproc: int | None, hosts: Sequence[Host] | None) -> None:
    """Raises InputError with the problems of every run that cannot start here."""
    refuse(trials, lambda trial: check_job(trial.job, local.ranks_of(trial.job, nproc, hosts)))


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
