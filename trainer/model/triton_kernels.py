"""Kernels of a transformer's block in Triton, and the functions that launch them. Imported where Triton is.

Each reads what it needs once and writes its results once; sums are float32. `fused_block.py` says what they
compute, in operations of torch: its plain form is their oracle.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.comm.accelerator import is_cuda
from trainer.model import long_attention
from trainer.model.long_attention import blocks_of, power_of_2

LONGEST = 128
"""Most tokens whose attention fits one program: all scores of a head, in registers."""

_LONGEST = {(9, 0): 640}
"""The same, by compute capability, where `long_attention` was measured and was faster than torch's."""

_WAVES = 8
"""Programs on each multiprocessor, for kernels whose programs walk over rows: enough loads are under way."""


@triton.jit
def _norm_forward(
    x_ptr,
    added_ptr,
    sum_ptr,
    gain_ptr,
    bias_ptr,
    out_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    width,
    eps,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    stream = tl.load(x_ptr + at, mask=inside, other=0.0)
    if ADDS:
        added = tl.load(added_ptr + at, mask=inside, other=0.0)
        stream = (stream.to(tl.float32) + added.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, stream, mask=inside)
    x = stream.to(tl.float32)
    mean = tl.sum(x, 1) / width
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / width + eps)
    gain = tl.load(gain_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    out = centred * rstd[:, None] * gain[None, :] + bias[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


def norm(
    x: Tensor, added: Tensor | None, gain: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launches `BlockOps.norm`."""
    x = x.contiguous()
    added = None if added is None else added.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    # A scaled branch may be wider than the stream, which then widens, as torch's sum does.
    stream = x if added is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, added.dtype))
    out = torch.empty_like(x, dtype=dtype)
    mean, rstd = x.new_empty(2, rows, dtype=torch.float32)
    per_program = 2
    _norm_forward[(blocks_of(rows, per_program),)](
        x, x if added is None else added, stream, gain, bias, out, mean, rstd, rows, width, eps,
        ADDS=added is not None, ROWS=per_program, BLOCK=power_of_2(width), num_warps=4,
    )  # fmt: skip
    return stream, out, mean, rstd


@triton.jit
def _norm_backward(
    grad_ptr,
    passed_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    gain_ptr,
    out_ptr,
    added_ptr,
    sums_ptr,
    rows,
    width,
    PASSED: tl.constexpr,
    SHORTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    of_gain = tl.zeros((BLOCK,), tl.float32)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    of_stream = tl.zeros((BLOCK,), tl.float32)
    at = tl.program_id(0).to(tl.int64) * width + column
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        unit = tl.where(inside, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
        scaled = grad * gain
        along = tl.sum(scaled * unit, 0) / width
        level = tl.sum(scaled, 0) / width
        out = (scaled - unit * along - level) * rstd
        if PASSED:
            out += tl.load(passed_ptr + at, mask=inside, other=0.0).to(tl.float32)
        short = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, short, mask=inside)
        if SHORTER:
            tl.store(added_ptr + at, short.to(added_ptr.dtype.element_ty), mask=inside)
        of_gain += grad * unit
        of_bias += grad
        of_stream += tl.where(inside, short.to(tl.float32), 0.0)
        at += tl.num_programs(0) * width
    first = sums_ptr + tl.program_id(0) * 3 * width + column
    tl.store(first, of_gain, mask=inside)
    tl.store(first + width, of_bias, mask=inside)
    tl.store(first + 2 * width, of_stream, mask=inside)


def norm_backward(
    grad: Tensor,
    passed: Tensor | None,
    stream: Tensor,
    mean: Tensor,
    rstd: Tensor,
    gain: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches `BlockOps.norm_backward`."""
    grad = grad.contiguous()
    passed = None if passed is None else passed.contiguous()
    width = stream.shape[-1]
    rows = stream.numel() // width
    programs = min(rows, _multiprocessors(stream) * _WAVES)
    out = torch.empty_like(stream)
    of_added = out if dtype == out.dtype else torch.empty_like(stream, dtype=dtype)
    sums = torch.empty(programs, 3, width, dtype=torch.float32, device=stream.device)
    _norm_backward[(programs,)](
        grad, grad if passed is None else passed, stream, mean, rstd, gain, out, of_added, sums, rows, width,
        PASSED=passed is not None, SHORTER=of_added is not out, BLOCK=power_of_2(width),
        num_warps=4,
    )  # fmt: skip
    return out, of_added, sums.sum(0)


@triton.jit
def _gelu_backward(
    grad_ptr,
    x_ptr,
    out_ptr,
    sums_ptr,
    rows,
    width,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = row[:, None] * width + column[None, :]
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if KIND == "quick":
            gate = tl.sigmoid(1.702 * x)
            slope = gate * (1.0 + 1.702 * x * (1.0 - gate))
        elif KIND == "tanh":
            # 0.5 (1 + tanh(y)) is sigmoid(2 y), with y = sqrt(2 / pi) (x + 0.044715 x^3)
            gate = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
            slope = gate * (1.0 + x * (1.0 - gate) * (1.5957691216057308 + 0.21406 * x * x))
        else:
            below = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
            slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
        out = (grad * slope).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, out, mask=inside)
        sums += out.to(tl.float32)
    tl.store(sums_ptr + tl.program_id(0) * width + column, tl.sum(sums, 0), mask=column < width)


def gelu_backward(grad: Tensor, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Launches `BlockOps.gelu_backward`."""
    grad, x = grad.contiguous(), x.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    tile_rows, tile_columns = 8, 256
    across = blocks_of(width, tile_columns)
    programs = min(blocks_of(rows, tile_rows), max(1, _multiprocessors(x) * _WAVES // across))
    out = torch.empty_like(x)
    sums = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _gelu_backward[(programs, across)](
        grad, x, out, sums, rows, width, KIND=kind, ROWS=tile_rows, COLUMNS=tile_columns, num_warps=4
    )
    return out, sums.sum(0)


@triton.jit
def _weights(q, k, first, tokens, scale, CAUSAL: tl.constexpr, Q: tl.constexpr, T: tl.constexpr):
    """Returns the weights of attention of Q queries from `first` on to T keys, float32 [Q, T]."""
    query, key = first + tl.arange(0, Q)[:, None], tl.arange(0, T)[None, :]
    seen = (key < tokens) & (key <= query) if CAUSAL else key < tokens
    scores = tl.where(seen, tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634), float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def _attend(
    joint_ptr, out_ptr, tokens, width, scale,
    CAUSAL: tl.constexpr, Q: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Computes one head of one sample, whose first token is at `joint_ptr` and `out_ptr`."""
    lane = tl.arange(0, D)[None, :]
    first_ptr, to_ptr = joint_ptr + lane, out_ptr + lane
    key = tl.arange(0, T)[:, None]
    k = tl.load(first_ptr + width + key * 3 * width, mask=key < tokens, other=0.0)
    v = tl.load(first_ptr + 2 * width + key * 3 * width, mask=key < tokens, other=0.0)
    for first in range(0, tokens, Q):
        query = first + tl.arange(0, Q)[:, None]
        q = tl.load(first_ptr + query * 3 * width, mask=query < tokens, other=0.0)
        out = tl.dot(_weights(q, k, first, tokens, scale, CAUSAL, Q, T).to(v.dtype), v)
        tl.store(to_ptr + query * width, out.to(v.dtype), mask=query < tokens)


@triton.jit
def _place(starts_ptr, tokens, sample, PACKED: tl.constexpr):
    """Returns the sample's first row and its tokens: all have as many, or `starts_ptr` says where each is."""
    if PACKED:
        first = tl.load(starts_ptr + sample).to(tl.int64)
        tokens = (tl.load(starts_ptr + sample + 1) - first).to(tl.int32)
    else:
        first = sample * tokens
    return first, tokens


# Captions come in several lengths, each of which would else be compiled anew in the middle of a run.
@triton.jit(do_not_specialize=["tokens"])
def _attention_forward(
    joint_ptr, out_ptr, starts_ptr, tokens, heads, scale,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, Q: tl.constexpr, T: tl.constexpr, FEW: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    width = heads * D
    first, tokens = _place(starts_ptr, tokens, sample, PACKED)
    joint_ptr += first * 3 * width + head * D
    out_ptr += first * width + head * D
    if PACKED:
        if tokens <= FEW:
            _attend(joint_ptr, out_ptr, tokens, width, scale, CAUSAL, FEW, FEW, D)
        else:
            _attend(joint_ptr, out_ptr, tokens, width, scale, CAUSAL, Q, T, D)
    else:
        _attend(joint_ptr, out_ptr, tokens, width, scale, CAUSAL, Q, T, D)


@triton.jit
def _attention_gradients(
    q, k, v, grad, first, tokens, scale, CAUSAL: tl.constexpr, Q: tl.constexpr, T: tl.constexpr
):
    """Returns what Q queries from `first` on give to the gradients of q, k and v."""
    weights = _weights(q, k, first, tokens, scale, CAUSAL, Q, T)
    of_v = tl.dot(tl.trans(weights.to(v.dtype)), grad)
    of_weights = tl.dot(grad, tl.trans(v))
    level = tl.sum(weights * of_weights, 1)
    of_scores = (weights * (of_weights - level[:, None]) * scale).to(v.dtype)
    of_k = tl.dot(tl.trans(of_scores), q)
    return tl.dot(of_scores, k).to(v.dtype), of_k, of_v


@triton.jit
def _attend_backward(
    joint_ptr, grad_ptr, out_ptr, sums_ptr, tokens, width, scale,
    CAUSAL: tl.constexpr, Q: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of one head of one sample, at whose first token the first three pointers are."""
    lane = tl.arange(0, D)[None, :]
    key = tl.arange(0, T)[:, None]
    k = tl.load(joint_ptr + lane + width + key * 3 * width, mask=key < tokens, other=0.0)
    v = tl.load(joint_ptr + lane + 2 * width + key * 3 * width, mask=key < tokens, other=0.0)
    to_ptr = sums_ptr + tl.arange(0, D)
    if Q == T:
        q = tl.load(joint_ptr + lane + key * 3 * width, mask=key < tokens, other=0.0)
        grad = tl.load(grad_ptr + lane + key * width, mask=key < tokens, other=0.0)
        of_q, of_k, of_v = _attention_gradients(q, k, v, grad, 0, tokens, scale, CAUSAL, Q, T)
        tl.store(out_ptr + lane + key * 3 * width, of_q, mask=key < tokens)
        tl.store(to_ptr, tl.sum(of_q.to(tl.float32), 0))
    else:
        of_k = tl.zeros((T, D), tl.float32)
        of_v = tl.zeros((T, D), tl.float32)
        sum_of_q = tl.zeros((D,), tl.float32)
        for first in range(0, tokens, Q):
            query = first + tl.arange(0, Q)[:, None]
            q = tl.load(joint_ptr + lane + query * 3 * width, mask=query < tokens, other=0.0)
            grad = tl.load(grad_ptr + lane + query * width, mask=query < tokens, other=0.0)
            of_q, part_k, part_v = _attention_gradients(q, k, v, grad, first, tokens, scale, CAUSAL, Q, T)
            of_k += part_k
            of_v += part_v
            tl.store(out_ptr + lane + query * 3 * width, of_q, mask=query < tokens)
            sum_of_q += tl.sum(of_q.to(tl.float32), 0)
        tl.store(to_ptr, sum_of_q)
    tl.store(out_ptr + lane + width + key * 3 * width, of_k.to(v.dtype), mask=key < tokens)
    tl.store(out_ptr + lane + 2 * width + key * 3 * width, of_v.to(v.dtype), mask=key < tokens)
    tl.store(to_ptr + width, tl.sum(of_k, 0))
    tl.store(to_ptr + 2 * width, tl.sum(of_v, 0))


@triton.jit(do_not_specialize=["tokens"])
def _attention_backward(
    joint_ptr, grad_ptr, out_ptr, sums_ptr, starts_ptr, tokens, heads, scale,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, Q: tl.constexpr, T: tl.constexpr, FEW: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    width = heads * D
    first, tokens = _place(starts_ptr, tokens, sample, PACKED)
    joint_ptr += first * 3 * width + head * D
    grad_ptr += first * width + head * D
    out_ptr += first * 3 * width + head * D
    sums_ptr += sample * 3 * width + head * D
    if PACKED:
        if tokens <= FEW:
            _attend_backward(
                joint_ptr, grad_ptr, out_ptr, sums_ptr, tokens, width, scale, CAUSAL, FEW, FEW, D
            )
        else:
            _attend_backward(joint_ptr, grad_ptr, out_ptr, sums_ptr, tokens, width, scale, CAUSAL, Q, T, D)
    else:
        _attend_backward(joint_ptr, grad_ptr, out_ptr, sums_ptr, tokens, width, scale, CAUSAL, Q, T, D)


FORWARD = {64: (64, 4), 128: (64, 4)}
"""Queries at a time and warps of attention's forward pass, by the tokens that a program has room for.

The fastest on an H100 of those with 16 to 128 queries and 4 or 8 warps.
"""
BACKWARD = {64: (64, 4), 128: (32, 4)}
"""The same for its backward pass."""


_FEW = 64
"""Tokens for which a program of packed captions has room, if they are enough for its own."""


def attention(
    joint: Tensor, heads: int, causal: bool, starts: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Launches `BlockOps.attention`."""
    joint = joint.contiguous()
    if starts is None and joint.shape[1] > LONGEST:
        return long_attention.attention(joint, heads, causal)
    samples, tokens, room = _shape(joint, starts)
    lanes = joint.shape[2] // (3 * heads)
    out = joint.new_empty(*joint.shape[:2], heads * lanes)
    queries, warps = FORWARD[room]
    _attention_forward[(samples * heads,)](
        joint, out, starts, tokens, heads, lanes**-0.5,
        PACKED=starts is not None, CAUSAL=causal, Q=queries, T=room, FEW=_FEW, D=lanes, num_warps=warps,
    )  # fmt: skip
    return out, ()


def attention_backward(
    joint: Tensor, kept: tuple[Tensor, ...], grad: Tensor, heads: int, causal: bool, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Launches `BlockOps.attention_backward`."""
    joint, grad = joint.contiguous(), grad.contiguous()
    if kept:
        seen, lse = kept
        return long_attention.attention_backward(joint, seen, lse, grad, heads, causal)
    samples, tokens, room = _shape(joint, starts)
    lanes = joint.shape[2] // (3 * heads)
    out = torch.empty_like(joint)
    sums = torch.empty(samples, joint.shape[2], dtype=torch.float32, device=joint.device)
    queries, warps = BACKWARD[room]
    _attention_backward[(samples * heads,)](
        joint, grad, out, sums, starts, tokens, heads, lanes**-0.5,
        PACKED=starts is not None, CAUSAL=causal, Q=queries, T=room, FEW=_FEW, D=lanes, num_warps=warps,
    )  # fmt: skip
    return out, sums.sum(0)


def _shape(joint: Tensor, starts: Tensor | None) -> tuple[int, int, int]:
    """Returns the samples, the tokens of each, and for how many a program has room."""
    if starts is not None:
        return len(starts) - 1, 0, LONGEST
    samples, tokens, _ = joint.shape
    return samples, tokens, 64 if tokens <= 64 else LONGEST


def longest(device: torch.device) -> int:
    """Returns the most tokens for which attention is called: a fact of each kind of GPU, and no trial's."""
    if not is_cuda(device):
        return max(_LONGEST.values())
    return _LONGEST.get(torch.cuda.get_device_capability(device), LONGEST)


def _multiprocessors(tensor: Tensor) -> int:
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 4
