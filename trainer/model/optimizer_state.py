"""Keeps in tensors of each parameter what timm's optimizers keep elsewhere, so that checkpoints give it back.

LAMB counts the steps of a group, and Muon notes for each parameter whether it is a matrix, which its group
says, too. Hooks before and after each step move that, and the class stays timm's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.config.optimizers import OptimizerName

_COUNT, _NOTE = "step", "use_muon"


def keep_exactly(optimizer: Optimizer, name: OptimizerName) -> Optimizer:
    """Returns the optimizer, whose state is tensors of parameters alone between two steps."""
    for register, hooks in (
        (optimizer.register_step_pre_hook, _BEFORE),
        (optimizer.register_step_post_hook, _AFTER),
    ):
        if name in hooks:
            register(lambda changed, *_, hook=hooks[name]: hook(changed))
    return optimizer


def _take_counts(optimizer: Optimizer) -> None:
    """Gives each group the count of its parameters; one that has none begins."""
    for group in optimizer.param_groups:
        counts = [state[_COUNT] for state in _states(optimizer, group) if _COUNT in state]
        if counts:
            group[_COUNT] = torch.stack(counts).max()


def _give_counts(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        count = group.pop(_COUNT)
        for state in _states(optimizer, group):
            state.setdefault(_COUNT, torch.zeros(())).fill_(count)


def _drop_notes(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state.pop(_NOTE, None)


def _states(optimizer: Optimizer, group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the states of the group's parameters that have been updated."""
    return [optimizer.state[each] for each in group["params"] if optimizer.state.get(each)]


_BEFORE: Mapping[str, Callable[[Optimizer], None]] = {"lamb": _take_counts}
_AFTER: Mapping[str, Callable[[Optimizer], None]] = {"lamb": _give_counts, "muon": _drop_notes}
