"""The command `clipship sweep`. Imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.options import (
    Command,
    NearChoice,
    count_option,
    given_hosts,
    hosts_option,
    job_argument,
    nproc_option,
    set_option,
)
from trainer.config.schedulers import SCHEDULERS
from trainer.errors import EXIT_DONE, InputError
from trainer.report.folder import has_started
from trainer.run.sweep_record import is_sweep
from trainer.text.paste import command as pasted
from trainer.text.terminal import say

if TYPE_CHECKING:
    from trainer.sweep.trials import Sweep


@click.command(cls=Command)
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
@click.option("--to", type=NearChoice(list(SCHEDULERS)), help="Submit all runs to this scheduler.")
@click.option("--list", "only_list", is_flag=True, help="Start nothing: show the runs and what they reached.")
@click.option("--wide", is_flag=True, help="Show every metric of the runs' last evaluations.")
@count_option("--parallel", "With --to slurm: let at most N runs of each array run at a time.")
@click.option(
    "--no-check",
    is_flag=True,
    help="With --to: do not check the data here, if only the cluster's nodes see it.",
)
def command(
    job_path: Path,
    grids: tuple[str, ...],
    overrides: tuple[str, ...],
    nproc: int | None,
    hosts: str | None,
    to: str | None,
    only_list: bool,
    wide: bool,
    parallel: int | None,
    no_check: bool,
) -> int:
    """Train JOB once for each combination of values, one run after the other here, or submit all of them.

    Each run has a folder named after JOB and its values. Every job is checked before the first one starts. A
    sweep that is started again goes on: runs that are done are left as they are, and so are those that a
    scheduler still has. A run that fails does not end the sweep.

    Examples:
      clipship sweep job.toml --grid optim.lr=1e-4,3e-4 --grid seed=0,1
      clipship sweep job.toml --grid optim.lr=1e-4,3e-4 --nproc 2 --set optim.steps=200
      clipship sweep job.toml --grid model.name=ViT-B-32,ViT-B-16 --to slurm
      clipship sweep job.toml --grid optim.lr=1e-4,3e-4 --list
    """
    from trainer.sweep.trials import check, find_sweep, run_all, show, submit_all, waiting

    if to is not None and (nproc is not None or hosts is not None):
        raise InputError("give either --to, or --nproc or --hosts: a scheduler starts the ranks itself")
    if parallel is not None and (to is None or not SCHEDULERS[to].takes_several):
        raise InputError("--parallel is for --to slurm: it submits runs as arrays of jobs")
    if no_check and to is None:
        raise InputError("--no-check is for --to: without it, the ranks run here and need the data here")
    named_hosts = given_hosts(nproc, hosts)
    sweep = find_sweep(job_path, overrides, grids, to)
    if only_list:
        show(sweep.trials, wide=wide)
        if any(has_started(trial.folder) for trial in sweep.trials):
            _name_report(sweep)
        return EXIT_DONE
    trials = waiting(sweep.trials)
    if to is not None:
        submit_all(sweep, trials, to, data=not no_check, parallel=parallel)
        return EXIT_DONE
    check(trials, nproc, named_hosts)
    sweep.record()
    code = run_all(trials, nproc, named_hosts)
    show(sweep.trials, wide=wide)
    _name_report(sweep)
    return code


def _name_report(sweep: "Sweep") -> None:
    """Name the command for the report, which needs the sweep's record beside the runs.

    The record is elsewhere if the machine that submitted the runs does not see their folders.
    """
    if not is_sweep(sweep.folder):
        sweep.record()
    say(f"the table with curves, on one page: {pasted('clipship', 'report', sweep.folder)}")
