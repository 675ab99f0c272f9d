"""Layer norms of half precision, which read and write it and compute in float32 inside."""

from typing import Any

import torch
from open_clip.transformer import LayerNorm, LayerNormFp32
from torch import Tensor, nn
from torch.nn import functional as F


def is_half(x: Tensor) -> bool:
    """Returns whether the stream has half precision, under autocast."""
    return x.dtype in (torch.bfloat16, torch.float16) and torch.is_autocast_enabled(x.device.type)


class FastLayerNorm(LayerNorm):  # type: ignore[misc]
    """Layer norm of open_clip, which casts its output."""

    def forward(self, x: Tensor) -> Any:
        if not is_half(x):
            return super().forward(x)
        return in_its_type(self, x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class FastLayerNormFp32(LayerNormFp32):  # type: ignore[misc]
    """Layer norm of open_clip that casts its input, too."""

    def forward(self, x: Tensor) -> Any:
        if not is_half(x):
            return super().forward(x)
        return in_its_type(self, x, self.weight.to(x.dtype), self.bias.to(x.dtype))


FAST_NORMS = (FastLayerNorm, FastLayerNormFp32)
"""Norms that take and give half precision."""


def normalised(norm: nn.Module, rounded: Any, x: Tensor) -> Any:
    """Returns the norm of x, by gain and bias that are rounded already, or by its own for None."""
    return norm(x) if rounded is None else in_its_type(norm, x, *rounded)


def in_its_type(norm: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns the norm of x in its own type, in which gain and bias are given."""
    with torch.autocast(x.device.type, enabled=False):
        return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
