"""The optimizer: AdamW with two groups."""

from collections.abc import Mapping

import torch
from torch import nn

from trainer.config import Optim

_SPARED = ("bn", "ln", "bias", "logit_scale")


def build_optimizer(parameters: Mapping[str, nn.Parameter], settings: Optim) -> torch.optim.AdamW:
    """Returns AdamW over the trained parameters, in two groups: with and without decay; see `decays`.

    `parameters` has those of a model by their names; of each, it may have a part of the rows alone.
    """
    trained = [(name, p) for name, p in parameters.items() if p.requires_grad]
    groups = [
        {"params": [p for name, p in trained if decays(name, p)], "weight_decay": settings.weight_decay},
        {"params": [p for name, p in trained if not decays(name, p)], "weight_decay": 0.0},
    ]
    # The fused kernel serves all parameters at once, and leaves a step out without asking the host.
    return torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Returns whether weight decay acts on the parameter.

    It spares gains, biases and the logit scale, which have at most one dimension, and tables of biases, which
    have more (Swin's `relative_position_bias_table`). The rule is that of open_clip_train's main.py, names
    included.
    """
    return parameter.ndim >= 2 and not any(part in name for part in _SPARED)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Sets the same learning rate in all groups."""
    for group in optimizer.param_groups:
        group["lr"] = value
