"""Runs a rank of `clipship eval` or `clipship embed`: `python -m trainer.evaluate.rank JOB RESULT WORK ...`.

Never imports `trainer.launch`. It reads from top to bottom: find this rank's place, meet the others, load the
model, do the work, write the result. It logs on stderr.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.comm.connect import connect
from trainer.comm.cpu_binding import bind_cpus
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.loader import load_job
from trainer.data.processes import start_process_server
from trainer.data.storage import use_storage
from trainer.evaluate.embed import embed
from trainer.evaluate.evaluation import Evaluation
from trainer.evaluate.rounds import stop_of
from trainer.evaluate.suite import measure_suite
from trainer.evaluate.trained import log_work, trained_clip
from trainer.safe_io.atomic import write_json
from trainer.world.console import exit_now, run_rank
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World

SUITE = "suite"
"""Name of the suite's results among the metrics."""


def main(job_path: str, result_path: str, work: str, *words: str) -> int:
    """Does a work of WORKS with the job's model as one of the ranks; rank 0 writes the result as JSON.

    Returns the exit code.
    """
    paths = Path(job_path), Path(result_path)
    return run_rank(sys.stderr, lambda world, heartbeat: _whole_run(*paths, work, words, world, heartbeat))


def _whole_run(
    job_path: Path, result_path: Path, work: str, words: Sequence[str], world: World, heartbeat: Heartbeat
) -> None:
    job = load_job(job_path)
    heartbeat.limits = job.timeouts.by_phase
    use_storage(job)
    servers = [start_process_server()] if job.data.workers else []
    bind_cpus(job, world, os.environ, servers)
    comm = connect(job, world, os.environ, heartbeat)
    result = WORKS[work](job, comm, *words)
    if world.rank == 0:
        write_json(result_path, {**result, "world_size": world.size})
    heartbeat.begin_phase("shutdown")
    comm.barrier(job.timeouts.init_s)
    comm.close()


def evaluate(job: Job, comm: Comm) -> dict[str, Any]:
    """Collective: returns the metrics that the job's `[eval]` asks of its pretrained model.

    The results of its suite stand under SUITE. Raises InputError, and Preempted if a stop is asked for.
    """
    log_work(job, comm)
    comm.heartbeat.begin_stage("data index")
    evaluation = Evaluation(job, comm)
    evaluation.say_left_out()
    job, clip = trained_clip(job, comm)
    metrics: dict[str, Any] = dict(evaluation(clip, stop_of(comm)))
    if job.eval.suite.names:
        metrics[SUITE] = measure_suite(clip, job, comm, stop_of(comm))
    return metrics


WORKS: Mapping[str, Callable[..., dict[str, Any]]] = {"evaluate": evaluate, "embed": embed}
"""Collective functions from a job, the ranks and the command's further words to the result, by name."""


if __name__ == "__main__":
    exit_now(main(*sys.argv[1:]))
