"""Multiplies float32 as a GPU does in TF32, on any device, where a program asks for it."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
_KEPT = 10
"""Bits of the mantissa that TF32 keeps of float32's 23."""


class Tf32(TorchDispatchMode):
    """Rounds the factors of products while `torch.get_float32_matmul_precision` is "high"; sums are whole."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _PRODUCTS and torch.get_float32_matmul_precision() == "high":
            self.products += 1
            args = (*args[:-2], *tree_map(_rounded, args[-2:]))
        return func(*args, **(kwargs or {}))


def _rounded(factor: Tensor) -> Tensor:
    """Returns the nearest values that TF32 has; ties go away from zero, as on a GPU."""
    if factor.dtype != torch.float32:
        return factor
    dropped = 23 - _KEPT
    bits = factor.contiguous().view(torch.int32)
    return ((bits + (1 << (dropped - 1))) & -(1 << dropped)).view(torch.float32)
