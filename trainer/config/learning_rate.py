"""The learning rate as a function of the step. Pure; imports no torch."""

import math

from trainer.config import Optim


def learning_rate(settings: Optim, step: int, steps: int) -> float:
    """Returns the learning rate of optimizer step `step` (from 0) of `steps`.

    It is a linear warm-up, then half a cosine down to min_lr.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    return (
        settings.min_lr + (settings.lr - settings.min_lr) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    )
