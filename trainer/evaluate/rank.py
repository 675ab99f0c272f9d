"""Runs one rank of `clipship eval`: `python -m trainer.evaluate.rank JOB RESULT [KEPT]`.

Never imports `trainer.launch`. It reads from top to bottom: find this rank's place, meet the others, load the
model, evaluate, write the result. It logs on stderr.
"""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.checkpoint.weights import with_loss_of_weights
from trainer.comm.connect import connect
from trainer.comm.cpu_binding import bind_cpus
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.config.loader import load_job
from trainer.data.processes import start_process_server
from trainer.data.storage import use_storage
from trainer.evaluate.evaluation import Evaluation
from trainer.evaluate.suite import measure_suite
from trainer.model.build import build_model
from trainer.model.loading import check_hub_weights
from trainer.safe_io.atomic import write_json
from trainer.text.wording import many
from trainer.world.console import exit_now, run_rank
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World

log = logging.getLogger("clipship")

SUITE = "suite"
"""Name of the suite's results among the metrics."""


def main(job_path: str, result_path: str, kept: str = "") -> int:
    """Evaluates the job's model as one of the ranks; rank 0 writes the metrics as JSON.

    `kept` is the folder for what a second evaluation need not compute again. Returns the exit code.
    """
    paths = Path(job_path), Path(result_path), Path(kept) if kept else None
    return run_rank(sys.stderr, lambda world, heartbeat: _whole_run(*paths, world, heartbeat))


def _whole_run(
    job_path: Path, result_path: Path, kept: Path | None, world: World, heartbeat: Heartbeat
) -> None:
    job = load_job(job_path)
    heartbeat.limits = job.timeouts.by_phase
    use_storage(job)
    servers = [start_process_server()] if job.data.workers else []
    bind_cpus(job, world, os.environ, servers)
    comm = connect(job, world, os.environ, heartbeat)
    metrics = evaluate(job, comm, kept)
    if world.rank == 0:
        write_json(result_path, {**metrics, "world_size": world.size})
    heartbeat.begin_phase("shutdown")
    comm.barrier(job.timeouts.init_s)
    comm.close()


def evaluate(job: Job, comm: Comm, kept: Path | None = None) -> dict[str, Any]:
    """Collective: returns the metrics that the job's `[eval]` asks of its pretrained model.

    The results of its suite stand under SUITE. Raises InputError, and Preempted if a stop is asked for.
    """
    log.info("%-12s %s with %s", "model", job.model.name, job.model.pretrained or "its own weights")
    log.info("%-12s %s, %s on %s", "world", many(comm.world.size, "rank"), comm.name, comm.device)
    comm.heartbeat.begin_stage("data index")
    evaluation = Evaluation(job, comm)
    evaluation.say_left_out()
    comm.heartbeat.begin_stage("building model")
    job = with_loss_of_weights(job, comm)
    clip = build_model(job, plan(job, comm.world.size), comm)
    check_hub_weights(job)
    comm.heartbeat.begin_phase("evaluation")
    metrics: dict[str, Any] = dict(evaluation(clip, _stop_of(comm)))
    if job.eval.suite.names:
        metrics[SUITE] = measure_suite(clip, job, comm, kept, _stop_of(comm))
    return metrics


def _stop_of(comm: Comm) -> Callable[[], bool]:
    return lambda: comm.heartbeat.stop_requested


if __name__ == "__main__":
    exit_now(main(*sys.argv[1:4]))
