"""The command `clipship doctor`: the checks that a run makes before it trains, and nothing else.

Imports no torch.
"""

import sys
import tempfile
from pathlib import Path

import click

from trainer.cli.options import (
    Command,
    given_hosts,
    hosts_option,
    job_argument,
    json_option,
    nproc_option,
    set_option,
)
from trainer.errors import InputError
from trainer.run.folder import not_written
from trainer.run.layout import JOB_FILE


@click.command(cls=Command)
@job_argument
@set_option
@nproc_option
@hosts_option
@json_option("Print one line of JSON instead of the table.")
def command(
    job_path: Path, overrides: tuple[str, ...], nproc: int | None, hosts: str | None, as_json: bool
) -> int:
    """Check nodes, collectives, network and GPUs as a run of JOB would, without training.

    Every rank checks its node; all ranks try each collective on known values, and measure it at the job's own
    message sizes. Each problem is reported with its node. Exit code 1: a run could not begin. No run folder
    is made.

    Examples:
      clipship doctor job.toml --nproc 2
      clipship doctor job.toml --hosts node1:8,node2:8 --json
    On a cluster, in an allocation of your own:
      srun python -m trainer.preflight job.toml
    """
    from trainer.config.loader import load_job
    from trainer.launch import local
    from trainer.run.folder import run_folder
    from trainer.run.start_job import write_start_job

    named_hosts = given_hosts(nproc, hosts)
    job = load_job(job_path, overrides)
    folder = run_folder(job).absolute()
    # the job and the supervisors' files go into a temporary folder: they belong to no run
    with _folder_beside(folder, seen_by_all=named_hosts is not None) as aside:
        arguments = ["--run-folder", str(folder), *["--json"] * as_json]
        path = Path(aside, JOB_FILE)
        write_start_job(
            path, job.model_copy(update={"logging": job.logging.model_copy(update={"runs": aside})})
        )
        rank = (sys.executable, "-P", "-m", "trainer.preflight", str(path), *arguments)
        return local.start_ranks(rank, job, nproc=nproc, hosts=named_hosts)


def _folder_beside(folder: Path, *, seen_by_all: bool) -> "tempfile.TemporaryDirectory[str]":
    """Makes a temporary folder; where all hosts must see it, in the nearest folder above the run's.

    Raises InputError if this user may not.
    """
    parent = next(parent for parent in folder.parents if parent.is_dir()) if seen_by_all else None
    try:
        return tempfile.TemporaryDirectory(prefix="clipship-doctor-", dir=parent)
    except OSError as problem:
        raise InputError(not_written(folder, problem)) from None
