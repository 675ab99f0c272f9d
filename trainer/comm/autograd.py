"""Collectives that the gradient passes through, exact on both backends.

Each rank's loss is its share of a sum over the ranks, so the backward pass of a gather sums, over the ranks,
the gradients of their shares, each rank those of its own rows. (Horovod's own gather divides that sum by the
number of ranks.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.comm.protocol import Comm


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Comm, started: Callable[[], Tensor] | None) -> Tensor:
        ctx.comm = comm
        return comm.all_gather(tensor) if started is None else started()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.reduce_scatter(grads[0]), None, None


def gather_with_grad(comm: Comm, tensor: Tensor, started: Callable[[], Tensor] | None = None) -> Tensor:
    """Gathers a tensor from all ranks, rank after rank: [n, d] -> [world_size * n, d].

    `started` gives the result if `Comm.start_all_gather` has begun with it. Collective, and so is its
    backward pass. A single rank gets the tensor itself.
    """
    if comm.world.size == 1:
        return tensor
    gathered: Tensor = _Gather.apply(tensor, comm, started)
    return gathered
