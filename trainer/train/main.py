"""Runs one rank: `python -m trainer.train JOB`, however it was started.

It reads from top to bottom: find this rank's place, meet the others, open the run folder, build, train,
evaluate, write the result. It never imports `trainer.launch`.
"""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from trainer.checkpoint.files import saved_ago_s
from trainer.checkpoint.resume import best_value
from trainer.comm.backends import check_restarts, launcher_of
from trainer.comm.connect import connect
from trainer.comm.cpu_binding import bind_cpus
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.data.processes import start_process_server
from trainer.data.storage import use_storage
from trainer.run.job_limits import rank_job
from trainer.train.checkpoint_policy import CheckpointPolicy
from trainer.train.hang_limits import limit_learner
from trainer.train.loop import Loop
from trainer.train.monitors import open_monitors
from trainer.train.opened import OpenRun, open_whole
from trainer.train.prepare import prepared
from trainer.train.result import write_result
from trainer.train.same_environment import check_same
from trainer.train.setup import TrainSetup
from trainer.world import lease
from trainer.world.console import exit_now, run_rank
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World
from trainer.world.variables import STARTS_AGAIN

log = logging.getLogger("clipship")


def main(job_path: Path, overrides: Sequence[str] = ()) -> int:
    """Runs this rank of the job; returns its exit code.

    A rank that fails leaves at once, so that the launcher ends the others.
    """
    return run_rank(sys.stdout, lambda world, heartbeat: _whole_run(job_path, overrides, world, heartbeat))


def _whole_run(job_path: Path, overrides: Sequence[str], world: World, heartbeat: Heartbeat) -> None:
    job = rank_job(job_path, overrides, world.node if world.local_size < world.size else "")
    heartbeat.limits = job.timeouts.by_phase
    heartbeat.learner = limit_learner(job, world, os.environ)
    check_restarts(job, launcher_of(os.environ), starts_again=STARTS_AGAIN in os.environ)
    use_storage(job)
    servers = [start_process_server()] if job.data.workers else []
    bind_cpus(job, world, os.environ, servers)
    lease.watch(heartbeat.lease)  # after the fork of the server, which has no threads
    comm = connect(job, world, os.environ, heartbeat)
    unequal = check_same(job, comm)
    opened = open_whole(job, comm)
    if unequal:
        log.warning("%s\n(health.same_environment = warn)", unequal)
    if opened is not None:
        train_whole(opened)
    heartbeat.begin_phase("shutdown")
    comm.barrier(job.timeouts.backstop_s)
    comm.close()


def prepare(job: Job, comm: Comm) -> TrainSetup | None:
    """Collective: prepares the stage in which the run goes on; None if the run is done already.

    Raises InputError on all ranks alike.
    """
    opened = open_whole(job, comm)
    return prepared(opened) if opened is not None else None


def train_whole(opened: OpenRun) -> None:
    """Collective: trains what is left of the run, one stage after the other.

    Raises Preempted if a request to stop ended it early.
    """
    skipped = train(prepared(opened))
    while not opened.stage.schedule.ends_run:
        opened.begin_next()
        skipped = train(prepared(opened), skipped)


def train(setup: TrainSetup, skipped: Mapping[str, int] | None = None) -> Mapping[str, int]:
    """Collective: runs the stage's remaining steps and evaluations.

    `skipped` counts by cause what all ranks have skipped in the run until the end of the stage before, if
    this start has trained it; returns it with those of this stage. After the last stage, result.json marks
    the run as done. Raises Preempted if a request to stop ended it early.
    """
    job, comm = setup.job, setup.comm
    best = best_value(job, comm, setup.run.checkpoints)
    ago_s = saved_ago_s(setup.run.checkpoints) if setup.start.memory else 0.0
    policy = CheckpointPolicy(
        job.checkpoint, job.eval, setup.schedule, setup.start.saved_step, best, saved_ago_s=ago_s
    )
    with open_monitors(setup, skipped) as monitors:
        result = Loop(setup, monitors, policy).run()
        result.raise_if_stopped()  # in the block, since metric writers record how the training ended
    if setup.schedule.ends_run:
        write_result(setup, result)
    return result.bad_samples


@click.command(help="Run one rank of JOB, started by torchrun, srun, mpirun or horovodrun.")
@click.argument("job", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the job file."
)
def command(job: Path, overrides: tuple[str, ...]) -> None:
    """Run one rank of JOB; its supervisor starts it."""
    exit_now(main(job, overrides))


if __name__ == "__main__":
    command()
