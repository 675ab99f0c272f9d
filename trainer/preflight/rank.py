"""Runs one rank of `clipship doctor` under its supervisor.

It does all that a run does before it trains, and nothing after it. No run folder is made. Rank 0 prints a
table, or JSON, on stdout.
"""

import logging
import os
import sys
from pathlib import Path

import click

from trainer.comm.connect import connect
from trainer.comm.cpu_binding import bind_cpus
from trainer.comm.device import smallest_gpu_bytes
from trainer.comm.rank_zero import of_rank_0
from trainer.comm.shared_folder import check_future_folder
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.copies.place import check_copies
from trainer.data.storage import check_storage, use_storage
from trainer.estimate.fit import with_micro_batch
from trainer.model.build import build_model
from trainer.preflight.check import preflight
from trainer.preflight.host_probe import try_place
from trainer.preflight.table import lines
from trainer.run.folder import run_folder
from trainer.run.job_limits import rank_job
from trainer.text.terminal import shown
from trainer.text.wording import many
from trainer.world.console import exit_now, run_rank
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World

log = logging.getLogger("clipship")


@click.command(help="Probe this rank's host and the network, as a run of JOB would.")
@click.argument("job_path", metavar="JOB", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the job file."
)
@click.option(
    "--run-folder",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder whose disk is probed, if it is not the job's run folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of the table.")
def command(job_path: Path, overrides: tuple[str, ...], folder: Path | None, as_json: bool) -> None:
    """Run one rank of `clipship doctor`; its supervisor starts it."""

    def work(world: World, heartbeat: Heartbeat) -> None:
        job = rank_job(job_path, overrides, world.node if world.local_size < world.size else "")
        _run_preflight(job, world, heartbeat, folder or run_folder(job), as_json)

    exit_now(run_rank(sys.stderr, work))


def _run_preflight(job: Job, world: World, heartbeat: Heartbeat, folder: Path, as_json: bool) -> None:
    """Collective: runs the preflight, and rank 0 prints it. Raises MachineError if a run could not begin."""
    heartbeat.limits = job.timeouts.by_phase
    check_storage(job)
    use_storage(job)
    bind_cpus(job, world, os.environ)
    comm = connect(job, world, os.environ, heartbeat)
    log.info("%-12s %s on %s, %s", "backend", comm.name, comm.device, many(world.size, "rank"))
    check_future_folder(folder, comm)
    for missing in of_rank_0(comm, lambda: try_place(job, folder)):
        log.warning("%-12s %s", "run folder", missing)
    check_copies(job, comm)
    if job.optim.max_batch_size_per_gpu == "auto":
        job = with_micro_batch(job, world.size, smallest_gpu_bytes(comm))
    batch_plan = plan(job, world.size)
    heartbeat.begin_stage("building model")
    clip = build_model(job, batch_plan, comm)
    heartbeat.begin_stage("preflight")
    report = preflight(job, comm, batch_plan, clip, folder)
    if world.rank == 0:
        output = (
            (report.as_json(),)
            if as_json
            else lines(report.measurements, report.findings, report.left_out, report.headline())
        )
        print(shown("\n".join(output)), flush=True)
    heartbeat.begin_phase("shutdown")
    comm.barrier(job.timeouts.init_s)
    comm.close()
    report.raise_errors()


if __name__ == "__main__":
    command()
