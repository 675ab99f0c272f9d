"""The optimizer of the job, over groups of parameters."""

from collections.abc import Mapping

import torch
from timm.optim import create_optimizer_v2
from torch import nn
from torch.optim import Optimizer

from trainer.config import Optim
from trainer.config.optimizers import OPTIMIZERS
from trainer.model.layer_numbers import Layer
from trainer.model.optimizer_state import keep_exactly
from trainer.model.parameter_groups import LR_SCALE, parameter_groups


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], settings: Optim, layers: Mapping[str, Layer] | None = None
) -> Optimizer:
    """Returns the job's optimizer over the trained parameters; see `parameter_groups`.

    `layers` are needed where learning rates differ by tower or depth.
    """
    row = OPTIMIZERS[settings.optimizer]
    groups = parameter_groups(parameters, settings, layers or {})
    arguments = row.arguments(settings.beta1, settings.beta2, settings.eps)
    if not row.factory:
        # The fused kernel serves all parameters at once, and leaves a step out without asking the host.
        return torch.optim.AdamW(groups, lr=settings.lr, fused=True, **arguments)
    made = create_optimizer_v2(
        groups, row.factory, lr=settings.lr, weight_decay=settings.weight_decay, **arguments
    )
    return keep_exactly(made, settings.optimizer)


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """Sets the learning rate of each group: the value times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = value * group[LR_SCALE]
