"""Loads the model that an evaluation or an embedding uses, on all ranks."""

import logging

from trainer.checkpoint.weights import with_loss_of_weights
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.model.build import Clip, build_model
from trainer.model.loading import check_hub_weights
from trainer.text.wording import many

log = logging.getLogger("clipship")


def log_work(job: Job, comm: Comm) -> None:
    """Logs the model and the ranks, before what takes long."""
    log.info("%-12s %s with %s", "model", job.model.name, job.model.pretrained or "its own weights")
    log.info("%-12s %s, %s on %s", "world", many(comm.world.size, "rank"), comm.name, comm.device)


def trained_clip(job: Job, comm: Comm) -> tuple[Job, Clip]:
    """Collective: returns the job's pretrained model, and the job with the loss of its weights.

    Raises InputError on all ranks alike.
    """
    comm.heartbeat.begin_stage("building model")
    job = with_loss_of_weights(job, comm)
    clip = build_model(job, plan(job, comm.world.size), comm)
    for note in clip.notes:
        log.info("%-12s %s", "model", note)
    check_hub_weights(job)
    comm.heartbeat.begin_phase("evaluation")
    return job, clip
