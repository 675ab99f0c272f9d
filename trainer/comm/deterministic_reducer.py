"""A reducer whose sums have the same bits in every run: it sums fixed groups of gradients in a fixed order.

DistributedDataParallel regroups its buckets after the first step, and Horovod fuses the gradients that happen
to be ready: both change the order of additions from run to run. This one uses only `Comm.all_reduce`, so it
serves both backends.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.comm.shards import Shards, WholeModel

GROUP_BYTES = 25 * 2**20


class DeterministicReducer:
    """Implements `protocol.Reducer`; communication does not overlap the backward pass."""

    def __init__(self, model: nn.Module, all_reduce: Callable[[Tensor], Tensor], world_size: int) -> None:
        self.module = model
        self.shards: Shards = WholeModel(model)
        self._all_reduce, self._world_size = all_reduce, world_size
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        yield

    def finish(self) -> None:
        """Collective: averages the gradients.

        A gradient that no rank has stays None; a rank that lacks one that others have counts as zero.
        """
        device = self._parameters[0].device
        used = self._all_reduce(
            torch.tensor([float(p.grad is not None) for p in self._parameters], device=device)
        ).tolist()
        shared = [p for p, ranks in zip(self._parameters, used, strict=True) if ranks]
        for group in _groups(shared):
            total = self._all_reduce(torch.cat([_gradient(p).reshape(-1) for p in group])) / self._world_size
            for parameter, piece in zip(group, total.split([p.numel() for p in group]), strict=True):
                parameter.grad = piece.view_as(parameter)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _groups(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yields groups of parameters in the model's order, each of one dtype.

    A group holds at most GROUP_BYTES bytes of gradients, or one parameter that is larger.
    """
    group: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if group and (parameter.dtype != group[0].dtype or size + parameter.nbytes > GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(parameter)
        size += parameter.nbytes
    if group:
        yield group
