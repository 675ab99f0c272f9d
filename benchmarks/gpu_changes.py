"""Changes that a case of `make bench-gpu` makes in our trainer, since no key of a job file can.

They are made in the benchmark's own process, before the trainer starts.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_cases import Skipped
from trainer.model import fused_block, kernels, long_attention, triton_kernels
from trainer.model.fused_block import BlockOps

_SHORT = 64
"""Tokens up to which attention stays as it is: those of an image of ViT-B-32 are 50."""
_CONTEXT = 77
"""Most tokens of a packed caption."""


def _compile_mode(mode: str) -> None:
    torch.compile = partial(torch.compile, mode=mode)


def _unpacked() -> None:
    kernels._takes_packed = lambda text: False


def _attention_up_to(tokens: int) -> None:
    """Leaves attention of more tokens, unless they are packed, to torch."""
    triton_kernels.longest = lambda device: tokens


def _one_program() -> None:
    _attention_up_to(triton_kernels.LONGEST)


def _long() -> None:
    """Computes attention of more than `_SHORT` tokens, unless they are packed, by `long_attention`."""
    _attention_up_to(1 << 20)
    plain = triton_kernels.attention

    def attention(joint: Tensor, heads: int, causal: bool, starts: Tensor | None) -> Any:
        if starts is None and joint.shape[1] > _SHORT:
            return long_attention.attention(joint.contiguous(), heads, causal)
        return plain(joint, heads, causal, starts)

    triton_kernels.attention = attention


def _torch_attention(backend: SDPBackend) -> None:
    """Computes attention of more than `_SHORT` tokens, unless they are packed, by one of torch's kernels."""
    _attention_up_to(_SHORT)
    plain = fused_block.attended

    def attended(
        joint_BTE: Tensor,
        heads: int,
        causal: bool = False,
        mask: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        if mask is not None or starts is not None:  # not in a step: where kernels are tried at the start
            return plain(joint_BTE, heads, causal, mask, starts)
        with sdpa_kernel(backend):
            return plain(joint_BTE, heads, causal)

    fused_block.attended = attended


class _WithBias(torch.autograd.Function):
    """Gives a bias that is in `joint` already the gradient that a linear layer would give it."""

    @staticmethod
    def forward(ctx: Any, joint: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        return joint.view_as(joint)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], grads[0].flatten(0, -2).sum(0, dtype=ctx.dtype)


def _varlen() -> None:
    """Computes the attention of packed captions by torch's `varlen_attn`."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        raise Skipped("varlen_attn is not in this torch") from None
    flags = inspect.signature(varlen_attn).parameters
    captions: Mapping[str, Any] = {"is_causal": True} if "is_causal" in flags else {"window_size": (-1, 0)}
    plain, as_int32 = fused_block.attention, lru_cache(maxsize=1)(Tensor.int)

    def attention(
        ops: BlockOps,
        joint_BTE: Tensor,
        bias: Tensor,
        heads: int,
        causal: bool,
        starts: Tensor | None = None,
    ) -> Tensor:
        if starts is None:
            return plain(ops, joint_BTE, bias, heads, causal)
        joint = _WithBias.apply(joint_BTE, bias)
        q, k, v = joint.view(joint.shape[1], 3, heads, -1).unbind(1)
        places = as_int32(starts)
        out: Any = varlen_attn(q, k, v, places, places, _CONTEXT, _CONTEXT, **captions)
        return out.flatten(1)[None]  # type: ignore[no-any-return]

    fused_block.attention = attention


CHANGES: Mapping[str, Callable[[], None]] = {
    "reduce-overhead": partial(_compile_mode, "reduce-overhead"),
    "unpacked": _unpacked,
    "one": _one_program,
    "long": _long,
    "flash": partial(_torch_attention, SDPBackend.FLASH_ATTENTION),
    "cudnn": partial(_torch_attention, SDPBackend.CUDNN_ATTENTION),
    "varlen": _varlen,
}


def apply(names: tuple[str, ...]) -> None:
    """Makes the changes; raises Skipped with the reason if this torch lacks what one needs."""
    for name in names:
        CHANGES[name]()
