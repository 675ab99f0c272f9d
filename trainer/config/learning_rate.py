"""The learning rate as a function of the step. Pure; imports no torch."""

import math
from collections.abc import Callable, Mapping

from trainer.config import Optim


def learning_rate(settings: Optim, step: int, steps: int) -> float:
    """Returns the learning rate of optimizer step `step` (from 0) of `steps`.

    It is a linear warm-up, then the curve of `settings.schedule` from lr down to min_lr, unless the decay to
    a nearer end has begun.
    """
    begin, peak = settings.decay_from_step, settings.decay_from_lr
    if begin is not None and peak is not None and step >= min(begin, settings.warmup_steps):
        share = _falling(settings, max(0, step - begin), max(1, steps - begin))
        return settings.min_lr + (peak - settings.min_lr) * share
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    return settings.min_lr + (settings.lr - settings.min_lr) * _CURVES[settings.schedule](
        settings, step, steps
    )


def words(settings: Optim) -> str:
    """Returns what follows the warm-up, in words."""
    if settings.decay_from_step is not None:
        end = f"from {settings.decay_from_lr:.3g} down to {settings.min_lr:g}"
        return f"then its schedule, and after step {settings.decay_from_step:,} {end}"
    if settings.schedule != "constant":
        return f"then a {'line' if settings.schedule == 'linear' else 'cosine'} to {settings.min_lr:g}"
    if not settings.cooldown_share:
        return "then constant"
    cooldown = f"in the last {settings.cooldown_share:.0%} of all steps down to {settings.min_lr:g}"
    return f"then constant, and {cooldown}"


def cooldown_steps(settings: Optim, steps: int) -> int:
    """Returns how many of all steps at the end are the cooldown."""
    return round(settings.cooldown_share * steps)


def _progress(settings: Optim, step: int, steps: int) -> float:
    """Returns the share of the steps after the warm-up that is done, at most 1."""
    return min((step - settings.warmup_steps) / max(1, steps - settings.warmup_steps), 1.0)


def _cosine(settings: Optim, step: int, steps: int) -> float:
    return (1 + math.cos(math.pi * _progress(settings, step, steps))) / 2


def _linear(settings: Optim, step: int, steps: int) -> float:
    return 1 - _progress(settings, step, steps)


def _constant(settings: Optim, step: int, steps: int) -> float:
    length = cooldown_steps(settings, steps)
    cooled = step - (steps - length)
    return 1.0 if cooled < 0 or not length else _falling(settings, cooled, length)


def _falling(settings: Optim, done: int, length: int) -> float:
    """Returns the share that is left in a cooldown of `length` steps after `done` of them."""
    left = max(0.0, 1 - done / length)
    return math.pow(left, settings.cooldown_power)


_CURVES: Mapping[str, Callable[[Optim, int, int], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
}
"""Value of optim.schedule -> share of lr - min_lr that a step after the warm-up still has."""
