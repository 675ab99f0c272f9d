"""Optimizer and learning rate: AdamW with two groups, warm-up and cosine as a function of the step."""

import math

import torch
from torch import nn

from trainer.job import Optim


def build(model: nn.Module, settings: Optim, device: torch.device) -> torch.optim.AdamW:
    """AdamW over what trains; no decay for gains, biases and the logit scale, which are the parameters of at most one dimension."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    # One kernel for all parameters instead of one for each; CPUs have none that is faster.
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=device.type == "cuda")


def learning_rate(settings: Optim, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `steps`: linear warm-up, then half a cosine down to min_lr."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    return settings.min_lr + (settings.lr - settings.min_lr) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """The same for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = value
