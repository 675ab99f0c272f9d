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
from trainer.model.lora import is_drawn
from trainer.model.optimizer import ANCHOR

FirstWeights = Mapping[nn.Parameter, Tensor]
"""Copies of the trained parameters as the run began; of parameters that are split, this rank's rows.

LoRA's A, which begins at random, is none of them: its B begins with zeros, and so does what both add.
"""


def first_weights(parameters: Mapping[str, nn.Parameter], job: Job) -> FirstWeights:
    """Returns copies of the parameters, which have the first weights; none if the job needs none.

    One copy serves anchor and mixture. It lies on the device for an anchor, which every step reads, else in
    the host's memory.
    """
    if not job.keeps_first_weights:
        return {}
    return {
        parameter: parameter.detach().to(parameter.device if job.optim.anchor else "cpu", copy=True)
        for name, parameter in parameters.items()
        if parameter.requires_grad and not is_drawn(name)
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
            anchored = [parameter for parameter in group["params"] if parameter in first]
            for part in in_parts([(parameter, first[parameter]) for parameter in anchored]):
                move_all([parameter for parameter, _ in part], [begin for _, begin in part], weight)
