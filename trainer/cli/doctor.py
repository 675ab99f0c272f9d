"""The command `clipship doctor`: the checks that a run makes before it trains, and nothing else.

Imports no torch.
"""

import sys
import tempfile
from pathlib import Path

import click

from trainer.cli.options import job_argument, set_option
from trainer.errors import InputError


@click.command(
    epilog="""\b
Examples:
  clipship doctor job.toml --nproc 2
  clipship doctor job.toml --hosts node1:8,node2:8 --json
On a cluster, in an allocation of your own:
  srun python -m trainer.preflight job.toml"""
)
@job_argument
@set_option
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks on this machine; without it, those of [resources].",
)
@click.option("--hosts", metavar="HOST:N,...", help="Hosts and the ranks on each, started over ssh.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the table.")
def command(
    job_path: Path, overrides: tuple[str, ...], nproc: int | None, hosts: str | None, as_json: bool
) -> int:
    """Check nodes, collectives, network and GPUs as a run of JOB would, without training.

    Every rank checks its node; all ranks try each collective on known values, and measure it at the job's own
    message sizes. Each problem is reported with its node. Exit code 1: a run could not begin. No run folder
    is made.
    """
    from trainer.config.loader import load_job
    from trainer.launch import local
    from trainer.launch.hosts import parse_hosts
    from trainer.run.folder import run_folder

    if nproc is not None and hosts is not None:
        raise InputError(
            "--nproc and --hosts exclude each other: --nproc starts ranks here, --hosts on the hosts named"
        )
    job = load_job(job_path, overrides)
    # the supervisors' files go into a temporary folder: they belong to no run
    with tempfile.TemporaryDirectory(prefix="clipship-doctor-") as aside:
        words = ["--run-folder", str(run_folder(job).absolute()), *["--json"] * as_json]
        rank = (sys.executable, "-P", "-m", "trainer.preflight", str(job_path.absolute()), *words)
        changed = (*overrides, f"logging.runs={aside}")
        return local.start_ranks(
            rank, job, nproc=nproc, hosts=None if hosts is None else parse_hosts(hosts), overrides=changed
        )
