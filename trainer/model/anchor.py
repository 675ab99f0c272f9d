"""Pull of the trained weights to those that the run began with (L2-SP, arXiv 1802.01483).

It is a step of its own after the update, as AdamW's decay is, and no term of the loss.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.config import Job
from trainer.internals import move_all
from trainer.model.ema import in_parts
from trainer.model.optimizer import ANCHOR

FirstWeights = Mapping[nn.Parameter, Tensor]
"""Copies of the trained parameters as the run began; of parameters that are split, this rank's rows."""


def first_weights(parameters: Mapping[str, nn.Parameter], job: Job) -> FirstWeights:
    """Returns copies of the parameters, which have the first weights; none if the job needs none.

    One copy serves anchor and mixture. It lies on the device for an anchor, which every step reads, else in
    the host's memory.
    """
    if not job.keeps_first_weights:
        return {}
    return {
        parameter: parameter.detach().to(parameter.device if job.optim.anchor else "cpu", copy=True)
        for parameter in parameters.values()
        if parameter.requires_grad
    }


@torch.no_grad()
def pull(optimizer: Optimizer, first: FirstWeights, finite: Tensor) -> None:
    """Moves each anchored parameter p to p - lr * anchor * (p - first); not if `finite` is false.

    `finite` is a scalar on the device, for which the host does not wait. A parameter that is still locked is
    where it began, and stays there.
    """
    for group in optimizer.param_groups:
        if group[ANCHOR]:
            weight = group["lr"] * group[ANCHOR] * finite.double()
            for part in in_parts([(parameter, first[parameter]) for parameter in group["params"]]):
                move_all([parameter for parameter, _ in part], [begin for _, begin in part], weight)
