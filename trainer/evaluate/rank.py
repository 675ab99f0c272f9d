"""What one rank of `clipship eval` runs: `python -m trainer.evaluate.rank JOB RESULT`. Never imports `trainer.launch`.

Reads from top to bottom: who am I, meet the others, load the model, evaluate, write. Says what it does on stderr.
"""

import logging
import os
import sys
from pathlib import Path

from open_clip.pretrained import download_pretrained_from_hf

from trainer import jobfile, model
from trainer.checkpoint.weights import with_loss_of_weights
from trainer.comm.connect import connect
from trainer.comm.protocol import Comm
from trainer.console import leave_now, run_rank
from trainer.data.processes import start_process_server
from trainer.errors import InputError
from trainer.evaluate.evaluation import Evaluation
from trainer.health.pulse import Pulse
from trainer.job import Job
from trainer.plan import plan
from trainer.whole_file import write_json
from trainer.world import World

log = logging.getLogger("clipship")

_HUB = "hf-hub:"


def main(job_path: str, result_path: str) -> int:
    """Evaluate the job's model as a rank among others; rank 0 writes the metrics as JSON. Returns the exit code."""
    return run_rank(sys.stderr, lambda world, pulse: _whole_run(Path(job_path), Path(result_path), world, pulse))


def _whole_run(job_path: Path, result_path: Path, world: World, pulse: Pulse) -> None:
    job = jobfile.load(job_path)
    pulse.limits = job.timeouts.by_phase
    comm = connect(job, world, os.environ, pulse)
    metrics = evaluate(job, comm)
    if world.rank == 0:
        write_json(result_path, {**metrics, "world_size": world.size})
    pulse.phase("shutdown")
    comm.barrier(job.timeouts.init_s)
    comm.close()


def evaluate(job: Job, comm: Comm) -> dict[str, float | int]:
    """Collective: what the job's `[eval]` asks of its pretrained model. Raises InputError, and Preempted where a stop is asked for."""
    log.info("%-12s %s with %s", "model", job.model.name, job.model.pretrained or "its own weights")
    log.info("%-12s %d ranks, %s on %s", "world", comm.world.size, comm.name, comm.device)
    evaluation = Evaluation(job, comm)
    job = with_loss_of_weights(job, comm)
    if job.data.workers:
        start_process_server()
    clip = _build(job, comm)
    comm.pulse.phase("evaluation")
    return evaluation(clip, lambda: comm.pulse.stop_asked)


def _build(job: Job, comm: Comm) -> model.Clip:
    try:
        clip = model.build(job, plan(job, comm.world.size), comm)
        if job.model.name.startswith(_HUB):  # open_clip goes on with random weights where the hub gives none
            download_pretrained_from_hf(job.model.name.removeprefix(_HUB), cache_dir=job.model.cache_dir)
        return clip
    except (RuntimeError, OSError) as error:  # a tag that is not there, weights of another model, what the hub does not give
        what = "\n".join(str(error).splitlines()[:4])
        raise InputError(f"{job.model.pretrained or 'weights'} cannot be loaded as {job.model.name}: {what}\nis --model right?") from None


if __name__ == "__main__":
    leave_now(main(*sys.argv[1:3]))
