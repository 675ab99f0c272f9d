"""What one rank of `clipship eval` runs: `python -m trainer.evaluate.rank JOB RESULT`. Never imports `trainer.launch`.

Reads from top to bottom: who am I, meet the others, load the model, evaluate, write. Says what it does on stderr.
"""

import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from open_clip.pretrained import download_pretrained_from_hf

from trainer import jobfile, model
from trainer.comm.connect import connect
from trainer.comm.protocol import Comm
from trainer.console import leave_now, speak
from trainer.data.processes import start_process_server
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, InputError
from trainer.evaluate.evaluation import Evaluation
from trainer.evaluate.weights import with_loss_of_weights
from trainer.exits import ExitRecord, record_exit
from trainer.job import Job
from trainer.plan import plan
from trainer.run import write_json
from trainer.world import World, detect

log = logging.getLogger("clipship")

_HUB = "hf-hub:"


def main(job_path: str, result_path: str) -> int:
    """Evaluate the job's model as a rank among others; rank 0 writes the metrics as JSON. Returns the exit code."""
    world = detect(os.environ, os.uname().nodename)
    speak(world, sys.stderr)
    try:
        job = jobfile.load(Path(job_path))
        comm = connect(job, world, os.environ)
        metrics = evaluate(job, comm)
        if world.rank == 0:
            write_json(Path(result_path), {**metrics, "world_size": world.size})
        comm.barrier(job.timeouts.init_s)
        comm.close()
    except InputError as error:
        _leave(world, EXIT_BAD_INPUT, str(error))
    except Exception as error:
        log.error("rank %d on %s failed\n%s", world.rank, world.node, "".join(traceback.format_exception(error)))
        _leave(world, EXIT_FAILED, f"{type(error).__name__}: {error}")
    return EXIT_DONE


def evaluate(job: Job, comm: Comm) -> dict[str, float | int]:
    """Collective: what the job's `[eval]` asks of its pretrained model. Raises InputError."""
    log.info("%-12s %s with %s", "model", job.model.name, job.model.pretrained or "its own weights")
    log.info("%-12s %d ranks, %s on %s", "world", comm.world.size, comm.name, comm.device)
    evaluation = Evaluation(job, comm)
    job = with_loss_of_weights(job, comm)
    if job.data.workers:
        start_process_server()
    return evaluation(_build(job, comm))


def _build(job: Job, comm: Comm) -> model.Clip:
    try:
        clip = model.build(job, plan(job, comm.world.size), comm)
        if job.model.name.startswith(_HUB):  # open_clip goes on with random weights where the hub gives none
            download_pretrained_from_hf(job.model.name.removeprefix(_HUB), cache_dir=job.model.cache_dir)
        return clip
    except (RuntimeError, OSError) as error:  # a tag that is not there, weights of another model, what the hub does not give
        what = "\n".join(str(error).splitlines()[:4])
        raise InputError(f"{job.model.pretrained or 'weights'} cannot be loaded as {job.model.name}: {what}\nis --model right?") from None


def _leave(world: World, exit_code: int, reason: str) -> NoReturn:
    """The reason for who started the ranks, then out at once: the others wait for this rank in a collective."""
    recorded = record_exit(ExitRecord(world.rank, world.node, exit_code, reason, time.time()), os.environ)
    if not recorded and world.rank == 0:
        print(f"clipship: {reason}", file=sys.stderr)
    leave_now(exit_code)


if __name__ == "__main__":
    leave_now(main(*sys.argv[1:3]))
