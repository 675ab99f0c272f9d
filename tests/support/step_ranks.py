"""The gradient of one global batch on ranks that are threads, each with its micro-batches."""

from typing import Any

import torch
from torch import Tensor

from tests.support.thread_ranks import run_ranks
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.model.build import untrained
from trainer.model.kernels import use_kernels
from trainer.train.step import MicroBatch, TrainStep


def gradients_of_ranks(
    job: Job, ranks: int, samples: tuple[Tensor, ...], teacher: Any = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss, the sum of the ranks' shares, and the gradient by parameter, as rank 0 has it.

    `samples` are images and tokens of the global batch, and perhaps the numbers of their groups. The
    model is the job's, in float64.
    """
    batch_plan = plan(job, ranks)
    models = [untrained(job).model.double().train() for _ in range(ranks)]
    for model in models:
        use_kernels(model, job.model)

    def rank_main(comm: Any) -> tuple[Tensor, dict[str, Tensor]]:
        own = slice(
            *(job.optim.global_batch_size * at // ranks for at in (comm.world.rank, comm.world.rank + 1))
        )
        parts = [tensor[own].split(batch_plan.micro_batch_size) for tensor in samples]
        step = TrainStep(job, batch_plan, comm, models[comm.world.rank], teacher)
        batches = [
            MicroBatch(part[0], part[1], groups=part[2] if len(part) > 2 else None)
            for part in zip(*parts, strict=True)
        ]
        share = step.gradients(batches, 0)
        return share, {n: p.grad.clone() for n, p in step.model.named_parameters() if p.grad is not None}

    done = run_ranks(ranks, rank_main)
    return torch.stack([share for share, _ in done]).sum(), done[0][1]
