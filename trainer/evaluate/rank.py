"""Runs one rank of `clipship eval`: `python -m trainer.evaluate.rank JOB RESULT`.

Never imports `trainer.launch`. It reads from top to bottom: find this rank's place, meet the others, load the
model, evaluate, write the result. It logs on stderr.
"""

import logging
import os
import sys
from pathlib import Path

from trainer.checkpoint.weights import with_loss_of_weights
from trainer.comm.connect import connect
from trainer.comm.cpu_binding import bind_cpus
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.config.loader import load_job
from trainer.data.processes import start_process_server
from trainer.evaluate.evaluation import Evaluation
from trainer.model.build import build_model
from trainer.model.loading import check_hub_weights
from trainer.safe_io.atomic import write_json
from trainer.supervise.console import exit_now, run_rank
from trainer.supervise.heartbeat import Heartbeat
from trainer.supervise.world import World
from trainer.text.wording import many

log = logging.getLogger("clipship")


def main(job_path: str, result_path: str) -> int:
    """Evaluates the job's model as one of the ranks; rank 0 writes the metrics as JSON.

    Returns the exit code.
    """
    return run_rank(
        sys.stderr, lambda world, heartbeat: _whole_run(Path(job_path), Path(result_path), world, heartbeat)
    )


def _whole_run(job_path: Path, result_path: Path, world: World, heartbeat: Heartbeat) -> None:
    job = load_job(job_path)
    heartbeat.limits = job.timeouts.by_phase
    bind_cpus(job, world, os.environ)
    if job.data.workers:
        start_process_server()
    comm = connect(job, world, os.environ, heartbeat)
    metrics = evaluate(job, comm)
    if world.rank == 0:
        write_json(result_path, {**metrics, "world_size": world.size})
    heartbeat.begin_phase("shutdown")
    comm.barrier(job.timeouts.init_s)
    comm.close()


def evaluate(job: Job, comm: Comm) -> dict[str, float | int]:
    """Collective: returns the metrics that the job's `[eval]` asks of its pretrained model.

    Raises InputError, and Preempted if a stop is asked for.
    """
    log.info("%-12s %s with %s", "model", job.model.name, job.model.pretrained or "its own weights")
    log.info("%-12s %s, %s on %s", "world", many(comm.world.size, "rank"), comm.name, comm.device)
    comm.heartbeat.begin_stage("data index")
    evaluation = Evaluation(job, comm)
    comm.heartbeat.begin_stage("building model")
    job = with_loss_of_weights(job, comm)
    clip = build_model(job, plan(job, comm.world.size), comm)
    check_hub_weights(job)
    comm.heartbeat.begin_phase("evaluation")
    return evaluation(clip, lambda: comm.heartbeat.stop_requested)


if __name__ == "__main__":
    exit_now(main(*sys.argv[1:3]))
