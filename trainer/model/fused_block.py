"""Functions that a transformer's block in half precision calls between its products, with their gradients.

Each passes over its values once where torch's own operations pass several times: a residual is added, normed
and counted in one go, and the sums that biases get as gradients fall off on the way. `PLAIN` computes them by
torch's operations, on any device and in any type; `triton_kernels.py` has them for GPUs. Letters: B samples,
T tokens, E = 3 D for queries, keys and values behind one another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from open_clip.transformer import QuickGELU
from timm.layers.activations import GELUTanh
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from trainer.comm.accelerator import is_cuda
from trainer.config import Model
from trainer.model import kernel_trial
from trainer.model.rounding import rounded

QUICK = 1.702
"""Factor in the sigmoid of OpenAI's GELU."""
_LANES = (32, 64)
"""Values of a head for which attention is fused: tiles of 128 fit the shared memory of few GPUs."""
_PACKED = (3, 64, 65, 1, 77)
"""Tokens of packed samples with which a start tries attention."""
Kept = tuple[Tensor, ...]


class BlockShape(NamedTuple):
    """Facts of a block on which the choice of its kernels depends."""

    tokens: int
    width: int
    heads: int
    causal: bool


_TRIED = frozenset(BlockShape(tokens, 128, 2, tokens == 77) for tokens in (50, 77, 257))
"""Shapes that each start tries, whatever the model's are."""
_CLOSE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
"""Largest difference of both forms by type, as a share of a result's norm: a few roundings of each value."""


@dataclass(frozen=True)
class BlockOps:
    """The functions of a block. Sums over samples and tokens are float32, or float64 where all else is."""

    norm: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    """(x, added or None, gain, bias, eps, dtype): returns x + added, its layer norm in `dtype`, and mean and
    reciprocal deviation of each row.
    """
    norm_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(gradient of the norm, gradient of the sum or None, the sum, means, deviations, gain, dtype): returns
    the gradient of the sum [B, T, D], the same in `dtype`, which what was added has, and sums [3, D]:
    gradients of gain and bias, and of a bias that was added.
    """
    gelu_backward: Callable[[Tensor, Tensor, str], tuple[Tensor, Tensor]]
    """(gradient, x, kind of GELU): returns the gradient of x, and its sum over all rows."""
    attention: Callable[[Tensor, int, bool, Tensor | None], tuple[Tensor, Kept]]
    """(joint_BTE, heads, causal, starts): returns [B, T, D], and what its gradient needs beside joint_BTE.

    With `starts` B is 1, and T all tokens of packed samples, see `packed_captions`.
    """
    attention_backward: Callable[[Tensor, Kept, Tensor, int, bool, Tensor | None], tuple[Tensor, Tensor]]
    """(joint_BTE, what was kept, gradient_BTD, heads, causal, starts): returns the gradient of joint_BTE, and
    its sum [E].
    """
    longest: int
    """Most tokens for which `attention` is called."""
    longest_packed: int
    """Most tokens of a packed sample."""


def _norm(
    x: Tensor, added: Tensor | None, gain: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stream = x if added is None else x + added
    wide = _wide(stream)
    variance, mean = torch.var_mean(wide, -1, correction=0)
    rstd = (variance + eps).rsqrt()
    normed = (wide - mean[..., None]) * rstd[..., None] * gain + bias
    return stream, normed.to(dtype), mean.flatten(), rstd.flatten()


def _norm_backward(
    grad: Tensor,
    passed: Tensor | None,
    stream: Tensor,
    mean: Tensor,
    rstd: Tensor,
    gain: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = stream.shape[:-1]
    wide, mean, rstd = _wide(grad), mean.view(*rows, 1), rstd.view(*rows, 1)
    unit = (_wide(stream) - mean) * rstd
    scaled = wide * gain
    out = (scaled - unit * (scaled * unit).mean(-1, keepdim=True) - scaled.mean(-1, keepdim=True)) * rstd
    short = (out if passed is None else out + passed).to(stream.dtype)
    return short, short.to(dtype), torch.stack([_sums(wide * unit), _sums(wide), _sums(short)])


def _gelu_backward(grad: Tensor, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    wide = _wide(x)
    if kind == "quick":
        gate = torch.sigmoid(QUICK * wide)
        out = _wide(grad) * gate * (1 + QUICK * wide * (1 - gate))
    else:
        out = torch.ops.aten.gelu_backward(_wide(grad), wide, approximate=kind)
    short = out.to(x.dtype)
    return short, _sums(short)


def heads_of(joint_BTE: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views of queries, keys and values, [B, heads, T, D / heads] each."""
    samples, length, width = joint_BTE.shape
    parts = joint_BTE.view(samples, length, 3, heads, width // (3 * heads))
    q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
    return q, k, v


def attended(
    joint_BTE: Tensor,
    heads: int,
    causal: bool = False,
    mask: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Returns attention [B, T, D] by torch's own operation, with its graph."""
    if starts is not None:
        mask, causal = _mask_of_packed(starts, joint_BTE.shape[1], causal), False
    q, k, v = heads_of(joint_BTE, heads)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    return out.transpose(1, 2).flatten(2)


def _mask_of_packed(starts: Tensor, tokens: int, causal: bool) -> Tensor:
    """Returns which tokens each one sees, [tokens, tokens]: those of its sample. Its size allows for few."""
    place = torch.arange(tokens, device=starts.device)
    sample = torch.bucketize(place, starts[1:], right=True)
    seen = sample[:, None] == sample
    return seen & (place <= place[:, None]) if causal else seen


def _attention(joint_BTE: Tensor, heads: int, causal: bool, starts: Tensor | None) -> tuple[Tensor, Kept]:
    return attended(joint_BTE, heads, causal, starts=starts), ()


def _attention_backward(
    joint_BTE: Tensor, _: Kept, grad_BTD: Tensor, heads: int, causal: bool, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        joint = joint_BTE.detach().requires_grad_()
        (grad,) = torch.autograd.grad(attended(joint, heads, causal, starts=starts), joint, grad_BTD)
    return grad, _sums(grad)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _sums(tensor: Tensor) -> Tensor:
    return _wide(tensor).flatten(0, -2).sum(0)


PLAIN = BlockOps(_norm, _norm_backward, _gelu_backward, _attention, _attention_backward, 1 << 30, 1 << 30)


def fused(device: torch.device) -> BlockOps:
    """Returns the functions in Triton, which compiles them at their first call."""
    from trainer.model import triton_kernels as kernels

    return BlockOps(
        kernels.norm,
        kernels.norm_backward,
        kernels.gelu_backward,
        kernels.attention,
        kernels.attention_backward,
        kernels.longest(device),
        kernels.LONGEST,
    )


class Unsummed(NamedTuple):
    """Output of a block whose last sum, `stream + added`, the next block computes with its first norm."""

    stream: Tensor
    """Sum so far, [B, T, D]."""
    added: Tensor
    """Branch that is added, [B T, D]: FSDP warns of a block that returns views."""
    bias: Tensor | None
    """Parameter that is in `added` already, without its graph; None: there is none."""

    @property
    def device(self) -> torch.device:
        """Device of both."""
        return self.stream.device

    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the stream, what is added in the stream's shape, and the bias."""
        return self.stream, self.added.view_as(self.stream), self.bias


class _AddAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: BlockOps,
        x: Tensor,
        added: Tensor | None,
        added_bias: Tensor | None,
        gain: Tensor,
        bias: Tensor,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        stream, normed, mean, rstd = ops.norm(x, added, gain, bias, eps, dtype)
        ctx.save_for_backward(stream, mean, rstd, gain)
        ctx.ops, ctx.added = ops, None if added is None else added.dtype
        ctx.types = [None if p is None else p.dtype for p in (added_bias, gain, bias)]
        ctx.set_materialize_grads(False)
        return stream, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, passed: Tensor | None, grad: Tensor) -> tuple[Any, ...]:
        stream, mean, rstd, gain = ctx.saved_tensors
        dtype = ctx.added or stream.dtype
        out, of_added, sums = ctx.ops.norm_backward(grad, passed, stream, mean, rstd, gain, dtype)
        of_bias, of_gain, of_norm = (
            None if dtype is None else part.to(dtype)
            for dtype, part in zip(ctx.types, (sums[2], sums[0], sums[1]), strict=True)
        )
        return None, out, of_added if ctx.added else None, of_bias, of_gain, of_norm, None, None


def add_and_norm(
    ops: BlockOps,
    x: Tensor,
    added: Tensor | None,
    added_bias: Tensor | None,
    norm: Any,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Returns x + added, and its layer norm in `dtype`.

    Later residuals are added to the sum that is returned, x itself if nothing is added: so their gradient and
    that of the norm meet here. `added_bias` is a parameter that is in `added` already, without its graph: it
    gets its gradient here.
    """
    result: tuple[Tensor, Tensor] = _AddAndNorm.apply(
        ops, x, added, added_bias, norm.weight, norm.bias, norm.eps, dtype
    )
    return result


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: BlockOps, x: Tensor, bias: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.ops, ctx.kind, ctx.dtype = ops, kind, bias.dtype
        return torch.sigmoid(QUICK * x).mul_(x) if kind == "quick" else F.gelu(x, approximate=kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        out, sums = ctx.ops.gelu_backward(grads[0], *ctx.saved_tensors, ctx.kind)
        return None, out, sums.to(ctx.dtype), None


def gelu(ops: BlockOps, x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """Returns GELU of x, by its `kind` (`kind_of_gelu`).

    `bias` is in x already, without its graph: it gets its gradient here.
    """
    result: Tensor = _Gelu.apply(ops, x, bias, kind)
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: BlockOps,
        joint_BTE: Tensor,
        bias: Tensor,
        heads: int,
        causal: bool,
        starts: Tensor | None,
    ) -> Tensor:
        out, kept = ops.attention(joint_BTE, heads, causal, starts)
        ctx.save_for_backward(joint_BTE, starts, *kept)
        ctx.ops, ctx.heads, ctx.causal, ctx.dtype = ops, heads, causal, bias.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        joint, starts, *kept = ctx.saved_tensors
        out, sums = ctx.ops.attention_backward(joint, tuple(kept), grads[0], ctx.heads, ctx.causal, starts)
        return None, out, sums.to(ctx.dtype), None, None, None


def attention(
    ops: BlockOps,
    joint_BTE: Tensor,
    bias: Tensor,
    heads: int,
    causal: bool,
    starts: Tensor | None = None,
) -> Tensor:
    """Returns [B, T, D]. `bias` is in joint_BTE already, without its graph: it gets its gradient here."""
    result: Tensor = _Attention.apply(ops, joint_BTE, bias, heads, causal, starts)
    return result


Weights = tuple[Tensor, Tensor]
"""Weight and bias of a linear layer."""


class BlockParts(NamedTuple):
    """Modules and parameters of a block: x + scale_1(out(attention(norm_1(x)))), and so the MLP's half."""

    norm_1: nn.Module
    joint: Weights
    heads: int
    out: Weights
    scale_1: nn.Module
    norm_2: nn.Module
    widens: Weights
    gelu: str
    narrows: Weights
    scale_2: nn.Module

    @property
    def has_tiles(self) -> bool:
        """Returns whether attention's heads are as wide as tiles of the kernels."""
        return self.joint[1].numel() // (3 * self.heads) in _LANES

    def can_be_fused(self) -> bool:
        """Returns whether each part is what `fused_forward` takes it for."""
        biases = (self.joint[1], self.out[1], self.widens[1], self.narrows[1])
        return (
            self.gelu != ""
            and all(bias is not None for bias in biases)
            and all(
                isinstance(norm, nn.LayerNorm) and norm.weight is not None and norm.bias is not None
                for norm in (self.norm_1, self.norm_2)
            )
        )


def kind_of_gelu(module: nn.Module) -> str:
    """Returns `none` for GELU, `tanh` for its approximation, `quick` for QuickGELU, else nothing."""
    if isinstance(module, QuickGELU):
        return "quick"
    if isinstance(module, GELUTanh):
        return "tanh"
    return module.approximate if type(module) is nn.GELU else ""


def fused_forward(
    ops: BlockOps,
    x: Tensor | Unsummed,
    parts: BlockParts,
    causal: bool,
    starts: Tensor | None = None,
    *,
    sums: bool = True,
) -> Tensor | Unsummed:
    """Computes what a block does under autocast, from parameters that are rounded together.

    A bias is used without its graph where a later function gives it its gradient. With `starts` x is
    [1, tokens, D] of packed samples. Without `sums` the next block computes the last sum.
    """
    dtype = torch.get_autocast_dtype(x.device.type)
    x, added, its_bias = x.parts() if isinstance(x, Unsummed) else (x, None, None)
    by_kernel = parts.has_tiles and (starts is not None or x.shape[1] <= ops.longest)
    unscaled = isinstance(parts.scale_1, nn.Identity)
    of_joint = parts.joint[1].detach() if by_kernel else parts.joint[1]
    of_out = parts.out[1].detach() if unscaled else parts.out[1]
    of_widens = parts.widens[1].detach()
    later = not sums and isinstance(parts.scale_2, nn.Identity)
    of_narrows = parts.narrows[1].detach() if later else parts.narrows[1]
    short = rounded(
        dtype,
        [
            parts.joint[0],
            of_joint,
            parts.out[0],
            of_out,
            parts.widens[0],
            of_widens,
            parts.narrows[0],
            of_narrows,
        ],
    )
    x, normed = add_and_norm(ops, x, added, its_bias, parts.norm_1, dtype)
    joint = F.linear(normed, short[0], short[1])
    if by_kernel:
        seen = attention(ops, joint, parts.joint[1], parts.heads, causal, starts)
    else:
        seen = attended(joint, parts.heads, causal, starts=starts)
    added = parts.scale_1(F.linear(seen, short[2], short[3]))
    x, normed = add_and_norm(ops, x, added, parts.out[1] if unscaled else None, parts.norm_2, dtype)
    hidden = gelu(ops, F.linear(normed, short[4], short[5]), parts.widens[1], parts.gelu)
    added = parts.scale_2(F.linear(hidden.flatten(0, -2), short[6], short[7]))
    return x + added.view_as(x) if sums else Unsummed(x, added, parts.narrows[1] if later else None)


def block_ops(
    settings: Model, device: torch.device, shapes: frozenset[BlockShape]
) -> tuple[BlockOps | None, str]:
    """Returns the functions in Triton for a device, and in words why there are none; empty if there are.

    Each start tries them on a few samples of the model's `shapes` and of some others, where their results
    must be those of the plain form.
    """
    if not is_cuda(device) or settings.compile:
        return None, ""
    problem = _problem_here(device, shapes)
    return (None, problem) if problem else (fused(device), "")


@cache
def _problem_here(device: torch.device, shapes: frozenset[BlockShape]) -> str:
    """A process tries its kernels once, also where it builds a teacher like the model."""
    return kernel_trial.lacking() or problem_of(fused(device), device, shapes=shapes)


def problem_of(
    ops: BlockOps,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    shapes: frozenset[BlockShape] = frozenset(),
) -> str:
    """Returns, in words, what keeps `ops` from giving the plain form's results; empty if nothing does."""
    tried = sorted(shapes | _TRIED)
    return kernel_trial.problem_of("Triton", lambda: _difference(ops, tried, device, dtype))


def _difference(ops: BlockOps, shapes: Sequence[BlockShape], device: torch.device, dtype: torch.dtype) -> str:
    results = [_results(form, ops.longest, shapes, device, dtype) for form in (ops, PLAIN)]
    for (name, found), (_, expected) in zip(*results, strict=True):
        error = (found.float() - expected.float()).norm()
        if not error <= _CLOSE[dtype] * expected.float().norm():
            return f"{name} of Triton differs from that of torch"
    return ""


def _results(
    ops: BlockOps, longest: int, shapes: Sequence[BlockShape], device: torch.device, dtype: torch.dtype
) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    found = []
    starts = torch.tensor([0, *_PACKED], device=device).cumsum(0)
    attended = [shape for shape in shapes if shape.tokens <= longest and shape.width // shape.heads in _LANES]
    for samples, (tokens, width, heads, causal), packed in (
        *((3, shape, None) for shape in attended),
        *((1, shape._replace(tokens=sum(_PACKED)), starts) for shape in attended if shape.causal),
    ):
        joint, grad = some(samples, tokens, 3 * width), some(samples, tokens, width)
        out, kept = ops.attention(joint, heads, causal, packed)
        gradients = ops.attention_backward(joint, kept, grad, heads, causal, packed)
        found += [("attention", part) for part in (out, *gradients)]
    widths = dict.fromkeys(shape.width for shape in shapes)
    for width, (tokens, stream_dtype) in product(widths, ((50, dtype), (77, torch.float32))):
        grad = some(3, tokens, width)
        x, passed = (some(3, tokens, width, dtype=stream_dtype) for _ in range(2))
        gain = some(width, dtype=torch.float32)
        for added in (None, grad.float(), grad):
            stream, normed, mean, rstd = ops.norm(x, added, gain, gain, 1e-5, dtype)
            found += [("layer norm", part) for part in (stream, normed, mean, rstd)]
        of_norm = ops.norm_backward(grad, passed, stream, mean, rstd, gain, dtype)
        found += [("layer norm", part) for part in of_norm]
        hidden, of_hidden = some(3, tokens, 4 * width), some(3, tokens, 4 * width)
        for kind in ("none", "tanh", "quick"):
            found += [("GELU", part) for part in ops.gelu_backward(of_hidden, hidden, kind)]
    return found
