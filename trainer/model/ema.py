"""Exponential moving average (EMA) of the trained weights, which is evaluated and saved beside them.

The EMA of a parameter is one of the optimizer's values of it: checkpoints, steps in memory, ranks that split
the model and the comparison of ranks keep it as they keep the others. Parameters that are locked, and the
statistics of batch norm, have none: their own values stand in its place.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.checkpoint.state import EMA
from trainer.config import Optim
from trainer.internals import copy_all, move_all

_AT_ONCE = 64
"""Parameters that are updated together; their differences take memory for a moment."""
_Pairs = Sequence[tuple[Tensor, Tensor]]


class Ema:
    """Updates the average after each step, and puts it in the place of the weights for evaluations."""

    def __init__(self, optimizer: Optimizer, settings: Optim) -> None:
        self._optimizer, self._settings = optimizer, settings

    def update(self, step: int, finite: Tensor) -> None:
        """Moves the average towards the weights after `step` (from 1); not if `finite` is false.

        `finite` is a scalar on the device, for which the host does not wait. As in timm's ModelEmaV3, the
        average is the weights themselves until the first step after `optim.ema_from_step`.
        """
        if self._settings.ema_decay is None:
            return
        weight = (1 - self._settings.ema_decay) * finite.double()
        for part in in_parts(list(self._begun())):
            _move(part, weight, whole=step <= self._settings.ema_from_step + 1)

    @contextmanager
    def in_place(self) -> Iterator[bool]:
        """Swaps weights and averages for the block, which gets whether there are averages.

        Nothing else may read or change the weights meanwhile.
        """
        pairs = [(parameter, state[EMA]) for parameter, state in self._states() if EMA in state]
        _swap(pairs)
        try:
            yield bool(pairs)
        finally:
            _swap(pairs)

    def _begun(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the parameters that have been updated, with their averages, which begin as the weights."""
        for parameter, state in self._states():
            if state:
                if EMA not in state:
                    state[EMA] = parameter.detach().clone()
                yield parameter, state[EMA]

    def _states(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        yield from self._optimizer.state.items()


def in_parts(pairs: _Pairs) -> Iterator[_Pairs]:
    """Yields the pairs in parts that are moved together."""
    return (pairs[first : first + _AT_ONCE] for first in range(0, len(pairs), _AT_ONCE))


@torch.no_grad()
def _move(pairs: _Pairs, weight: Tensor, *, whole: bool) -> None:
    parameters: list[Tensor] = [parameter for parameter, _ in pairs]
    averages: list[Tensor] = [average for _, average in pairs]
    if whole:
        copy_all(averages, parameters)
    else:
        move_all(averages, parameters, weight)


@torch.no_grad()
def _swap(pairs: _Pairs) -> None:
    for parameter, average in pairs:
        kept = parameter.clone()
        parameter.copy_(average)
        average.copy_(kept)
