"""The command `clipship doctor`: what a run looks at before it trains, alone. Imports no torch."""

import sys
import tempfile
from pathlib import Path

import click

from trainer.errors import InputError
from trainer.launch.options import job_argument, set_option


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
@click.option("--nproc", type=click.IntRange(min=1), metavar="N", help="Ranks on this machine; without it, those of [resources].")
@click.option("--hosts", metavar="HOST:N,...", help="Hosts and the ranks on each, started over ssh.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of the table.")
def command(job_path: Path, overrides: tuple[str, ...], nproc: int | None, hosts: str | None, as_json: bool) -> int:
    """Check nodes, collectives, network and GPUs as a run of JOB would, without training.

    Every rank looks at its node; all ranks try each collective on known values, and measure it at the job's own message sizes. What is odd
    is named with its node. Exit code 1: a run could not begin. No run folder is made.
    """
    from trainer import jobfile
    from trainer.inputs.run_folder import run_folder
    from trainer.launch import local
    from trainer.launch.hosts import parse_hosts

    if nproc is not None and hosts is not None:
        raise InputError("--nproc and --hosts exclude each other: --nproc starts ranks here, --hosts on the hosts named")
    job = jobfile.load(job_path, overrides)
    with tempfile.TemporaryDirectory(prefix="clipship-doctor-") as aside:  # what supervisors write is no part of a run of before
        words = [word for override in (*overrides, f"logging.runs={aside}") for word in ("--set", override)]
        words += ["--run-folder", str(run_folder(job).absolute()), *["--json"] * as_json]
        rank = (sys.executable, "-P", "-m", "trainer.preflight", str(job_path.absolute()), *words)
        return local.start_ranks(rank, job, nproc=nproc, hosts=None if hosts is None else parse_hosts(hosts))
