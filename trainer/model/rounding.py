"""Rounds all parameters of a block to half precision at once, and widens their gradients again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.internals import copy_all


def rounded(dtype: torch.dtype, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the parameters in a shorter type; themselves if they have it, as FSDP gathers them.

    Copies would stay from forward to backward, though FSDP has freed what it gathered.
    """
    if all(parameter.dtype == dtype for parameter in parameters):
        return parameters
    short: tuple[Tensor, ...] = _Rounded.apply(dtype, *parameters)
    return short


class _Rounded(torch.autograd.Function):
    """Rounds tensors to a shorter type, and widens their gradients again, with one kernel each."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        rounded = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
        copy_all(rounded, tensors)
        fixed = (new for new, needed in zip(rounded, ctx.needs_input_grad[1:], strict=True) if not needed)
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        return tuple(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = {number: grad for number, grad in enumerate(grads) if grad is not None}
        wide = {number: torch.empty_like(grad, dtype=ctx.dtypes[number]) for number, grad in given.items()}
        if given:
            copy_all(list(wide.values()), list(given.values()))
        return None, *(wide.get(number) for number in range(len(grads)))
