"""Reducers that serve several backends: for sums with the same bits in every run, and for a single rank.

The first sums fixed groups of gradients in a fixed order. DistributedDataParallel regroups its buckets after
the first step, and Horovod fuses the gradients that happen to be ready: both change the order of additions
from run to run. This one uses only `Comm.all_reduce`, so it serves both backends. A single rank's gradient is
the whole gradient already: nothing is copied or sent.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor, nn

from trainer.comm.host_memory import groups_of
from trainer.comm.shards import Shards, WholeModel

GROUP_BYTES = 25 * 2**20


class DeterministicReducer:
    """Implements `protocol.Reducer`; communication does not overlap the backward pass."""

    def __init__(
        self,
        model: nn.Module,
        all_reduce: Callable[[Tensor], Tensor],
        world_size: int,
        *,
        find_unused: bool = False,
    ) -> None:
        self.module = model
        self.shards: Shards = WholeModel(model)
        self._all_reduce, self._world_size, self._find_unused = all_reduce, world_size, find_unused
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        yield

    def finish(self) -> None:
        """Collective: averages the gradients.

        With `find_unused` a gradient that no rank has stays None, and a rank that lacks one that others have
        counts as zero; to find that out, the host waits for the device. Without it all ranks must have all:
        raises RuntimeError.
        """
        for group in _groups(self._used() if self._find_unused else self._all()):
            total = self._all_reduce(torch.cat([_gradient(p).reshape(-1) for p in group])) / self._world_size
            for parameter, piece in zip(group, total.split([p.numel() for p in group]), strict=True):
                parameter.grad = piece.view_as(parameter)

    def _all(self) -> list[nn.Parameter]:
        if missing := [name for name, parameter in self._parameters.items() if parameter.grad is None]:
            raise RuntimeError(no_gradient(missing))
        return list(self._parameters.values())

    def _used(self) -> list[nn.Parameter]:
        parameters = list(self._parameters.values())
        has = [float(parameter.grad is not None) for parameter in parameters]
        used = self._all_reduce(torch.tensor(has, device=parameters[0].device)).tolist()
        return [parameter for parameter, ranks in zip(parameters, used, strict=True) if ranks]


def no_gradient(names: list[str]) -> str:
    """Returns a sentence for parameters that a step has left out, with what to do."""
    return (
        f"no gradient for {', '.join(names[:5])}: set comm.find_unused_parameters = true, or lock the tower"
    )


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _groups(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yields groups of parameters in the model's order, each of one dtype.

    A group holds at most GROUP_BYTES bytes of gradients, or one parameter that is larger.
    """
    for _, alike in groupby(parameters, attrgetter("dtype")):
        yield from groups_of(alike, GROUP_BYTES, attrgetter("nbytes"))


class LocalReducer:
    """Implements `protocol.Reducer` for a world of one rank."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self.shards: Shards = WholeModel(model)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        yield

    def finish(self) -> None:
        """Does nothing: the mean over one rank is its own gradient."""
