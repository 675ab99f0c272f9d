"""Attention of more tokens than one program has room for, in Triton: forward, and all its gradients.

Programs walk over tiles of keys or queries. What is left beyond whole tiles gets a smaller tile of its own,
or for a single key (an image's 16 x 16 patches and their class token) no tile but a sum: 257 tokens would
else be computed as 320. No two programs add to one value in an order of chance: results are the same each
time.
`lse` is the logarithm, to the base 2, of each query's sum of exponentials.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_LEAST = 16
"""Rows and columns of the smallest tile that a GPU multiplies."""


@triton.jit
def _rows(pointer, first, tokens, stride, MASKED: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """Loads N rows from `first` on, zeros beyond the last."""
    row = first + tl.arange(0, N)[:, None]
    at = pointer + row * stride + tl.arange(0, D)[None, :]
    return tl.load(at, mask=row < tokens, other=0.0) if MASKED else tl.load(at)


@triton.jit
def _seen_online(
    q, k, v, query, first, tokens, scale, best, total, out,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Adds K keys from `first` on to what Q queries have seen."""
    scores = tl.dot(q, tl.trans(k)) * scale
    key = first + tl.arange(0, K)[None, :]
    if CAUSAL:
        scores = tl.where(key <= query[:, None], scores, float("-inf"))
    if MASKED:
        scores = tl.where(key < tokens, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    fades = tl.exp2(best - higher)
    weights = tl.exp2(scores - higher[:, None])
    out = tl.dot(weights.to(v.dtype), v, out * fades[:, None])
    return higher, total * fades + tl.sum(weights, 1), out


@triton.jit
def _attend(
    joint_ptr, out_ptr, lse_ptr, first, tokens, width, scale,
    CAUSAL: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, REST: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Computes Q queries from `first` on of one head."""
    stride = 3 * width
    query = first + tl.arange(0, Q)
    q = _rows(joint_ptr, first, tokens, stride, True, Q, D)
    whole = tokens // K * K
    if REST == 1:
        lane = tl.arange(0, D)
        last_ptr = joint_ptr + whole * stride + lane
        k_last = tl.load(last_ptr + width).to(tl.float32)
        best = tl.sum(q.to(tl.float32) * k_last[None, :], 1) * scale
        total = tl.full((Q,), 1.0, tl.float32)
        out = tl.zeros((Q, D), tl.float32) + tl.load(last_ptr + 2 * width).to(tl.float32)[None, :]
    else:
        best = tl.full((Q,), float("-inf"), tl.float32)
        total = tl.zeros((Q,), tl.float32)
        out = tl.zeros((Q, D), tl.float32)
    for start in range(0, tl.minimum(whole, first + Q) if CAUSAL else whole, K):
        k = _rows(joint_ptr + width, start, tokens, stride, False, K, D)
        v = _rows(joint_ptr + 2 * width, start, tokens, stride, False, K, D)
        best, total, out = _seen_online(
            q, k, v, query, start, tokens, scale, best, total, out, CAUSAL, False, K
        )
    if REST > 1:
        k = _rows(joint_ptr + width, whole, tokens, stride, True, REST, D)
        v = _rows(joint_ptr + 2 * width, whole, tokens, stride, True, REST, D)
        best, total, out = _seen_online(
            q, k, v, query, whole, tokens, scale, best, total, out, CAUSAL, True, REST
        )
    out = out / total[:, None]
    at = out_ptr + query[:, None] * width + tl.arange(0, D)[None, :]
    tl.store(at, out.to(q.dtype), mask=query[:, None] < tokens)
    tl.store(lse_ptr + query, best + tl.log2(total), mask=query < tokens)


# Captions come in several lengths, each of which would else be compiled anew in the middle of a run.
@triton.jit(do_not_specialize=["tokens"])
def _forward(
    joint_ptr, out_ptr, lse_ptr, tokens, heads, blocks, scale,
    CAUSAL: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, LAST: tl.constexpr, REST: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    of_head, first = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * Q
    sample, head, width = of_head // heads, of_head % heads, heads * D
    joint_ptr += sample * tokens * 3 * width + head * D
    out_ptr += sample * tokens * width + head * D
    lse_ptr += of_head * tokens
    if LAST < Q:
        if first + Q > tokens:
            _attend(joint_ptr, out_ptr, lse_ptr, first, tokens, width, scale, CAUSAL, LAST, K, REST, D)
        else:
            _attend(joint_ptr, out_ptr, lse_ptr, first, tokens, width, scale, CAUSAL, Q, K, REST, D)
    else:
        _attend(joint_ptr, out_ptr, lse_ptr, first, tokens, width, scale, CAUSAL, Q, K, REST, D)


@triton.jit
def _seen_by_queries(
    q, grad, k, v, lse, level, query, first, tokens, scale, of_q,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Adds what K keys from `first` on give to the gradient of Q queries."""
    weights = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    key = first + tl.arange(0, K)[None, :]
    if CAUSAL:
        weights = tl.where(key <= query[:, None], weights, 0.0)
    if MASKED:
        weights = tl.where(key < tokens, weights, 0.0)
    of_scores = weights * (tl.dot(grad, tl.trans(v)) - level[:, None])
    return tl.dot(of_scores.to(k.dtype), k, of_q)


@triton.jit
def _queries(
    joint_ptr, seen_ptr, grad_ptr, lse_ptr, level_ptr, to_ptr, sums_ptr, first, tokens, width, scale,
    CAUSAL: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, REST: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of Q queries from `first` on of one head, and the levels of their scores."""
    stride = 3 * width
    lane = tl.arange(0, D)
    query = first + tl.arange(0, Q)
    q = _rows(joint_ptr, first, tokens, stride, True, Q, D)
    grad = _rows(grad_ptr, first, tokens, width, True, Q, D)
    seen = _rows(seen_ptr, first, tokens, width, True, Q, D)
    level = tl.sum(grad.to(tl.float32) * seen.to(tl.float32), 1)
    tl.store(level_ptr + query, level, mask=query < tokens)
    lse = tl.load(lse_ptr + query, mask=query < tokens, other=float("inf"))
    steep = scale * 1.4426950408889634
    whole = tokens // K * K
    of_q = tl.zeros((Q, D), tl.float32)
    if REST == 1:
        last_ptr = joint_ptr + whole * stride + lane
        k_last, v_last = (
            tl.load(last_ptr + width).to(tl.float32),
            tl.load(last_ptr + 2 * width).to(tl.float32),
        )
        weight = tl.exp2(tl.sum(q.to(tl.float32) * k_last[None, :], 1) * steep - lse)
        of_score = weight * (tl.sum(grad.to(tl.float32) * v_last[None, :], 1) - level)
        of_q += of_score[:, None] * k_last[None, :]
    for start in range(0, tl.minimum(whole, first + Q) if CAUSAL else whole, K):
        k = _rows(joint_ptr + width, start, tokens, stride, False, K, D)
        v = _rows(joint_ptr + 2 * width, start, tokens, stride, False, K, D)
        of_q = _seen_by_queries(
            q, grad, k, v, lse, level, query, start, tokens, steep, of_q, CAUSAL, False, K
        )
    if REST > 1:
        k = _rows(joint_ptr + width, whole, tokens, stride, True, REST, D)
        v = _rows(joint_ptr + 2 * width, whole, tokens, stride, True, REST, D)
        of_q = _seen_by_queries(
            q, grad, k, v, lse, level, query, whole, tokens, steep, of_q, CAUSAL, True, REST
        )
    of_q *= scale
    tl.store(to_ptr + query[:, None] * stride + lane[None, :], of_q.to(q.dtype), mask=query[:, None] < tokens)
    tl.store(sums_ptr + lane, tl.sum(of_q, 0))


@triton.jit(do_not_specialize=["tokens"])
def _queries_backward(
    joint_ptr, seen_ptr, grad_ptr, lse_ptr, level_ptr, to_ptr, sums_ptr, tokens, heads, blocks, rows, scale,
    CAUSAL: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, LAST: tl.constexpr, REST: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    of_head, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    sample, head, width = of_head // heads, of_head % heads, heads * D
    first = block * Q
    joint_ptr += sample * tokens * 3 * width + head * D
    to_ptr += sample * tokens * 3 * width + head * D
    seen_ptr += sample * tokens * width + head * D
    grad_ptr += sample * tokens * width + head * D
    lse_ptr += of_head * tokens
    level_ptr += of_head * tokens
    sums_ptr += (sample * rows + block) * 3 * width + head * D
    if LAST < Q:
        if first + Q > tokens:
            _queries(
                joint_ptr, seen_ptr, grad_ptr, lse_ptr, level_ptr, to_ptr, sums_ptr, first, tokens, width,
                scale, CAUSAL, LAST, K, REST, D,
            )  # fmt: skip
        else:
            _queries(
                joint_ptr, seen_ptr, grad_ptr, lse_ptr, level_ptr, to_ptr, sums_ptr, first, tokens, width,
                scale, CAUSAL, Q, K, REST, D,
            )  # fmt: skip
    else:
        _queries(
            joint_ptr, seen_ptr, grad_ptr, lse_ptr, level_ptr, to_ptr, sums_ptr, first, tokens, width,
            scale, CAUSAL, Q, K, REST, D,
        )  # fmt: skip


@triton.jit
def _seen_by_keys(
    k, v, joint_ptr, grad_ptr, lse_ptr, level_ptr, key, first, tokens, width, scale, of_k, of_v,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, Q: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Adds what Q queries from `first` on give to the gradients of keys and values."""
    q = _rows(joint_ptr, first, tokens, 3 * width, MASKED, Q, D)
    grad = _rows(grad_ptr, first, tokens, width, MASKED, Q, D)
    query = first + tl.arange(0, Q)
    lse = tl.load(lse_ptr + query, mask=query < tokens, other=float("inf"))
    level = tl.load(level_ptr + query, mask=query < tokens, other=0.0)
    weights = tl.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])
    if CAUSAL:
        weights = tl.where(key[:, None] <= query[None, :], weights, 0.0)
    of_v = tl.dot(weights.to(grad.dtype), grad, of_v)
    of_scores = weights * (tl.dot(v, tl.trans(grad)) - level[None, :])
    return tl.dot(of_scores.to(q.dtype), q, of_k), of_v


@triton.jit
def _keys(
    joint_ptr, grad_ptr, lse_ptr, level_ptr, to_ptr, sums_ptr, first, tokens, width, scale,
    CAUSAL: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, REST: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of K keys from `first` on, and of their values, of one head."""
    stride = 3 * width
    key = first + tl.arange(0, K)
    k = _rows(joint_ptr + width, first, tokens, stride, True, K, D)
    v = _rows(joint_ptr + 2 * width, first, tokens, stride, True, K, D)
    steep = scale * 1.4426950408889634
    whole = tokens // Q * Q
    of_k = tl.zeros((K, D), tl.float32)
    of_v = tl.zeros((K, D), tl.float32)
    if REST > 0:
        of_k, of_v = _seen_by_keys(
            k, v, joint_ptr, grad_ptr, lse_ptr, level_ptr, key, whole, tokens, width, steep, of_k, of_v,
            CAUSAL, True, REST, D,
        )  # fmt: skip
    for start in range(first // Q * Q if CAUSAL else 0, whole, Q):
        of_k, of_v = _seen_by_keys(
            k, v, joint_ptr, grad_ptr, lse_ptr, level_ptr, key, start, tokens, width, steep, of_k, of_v,
            CAUSAL, False, Q, D,
        )  # fmt: skip
    inside = key[:, None] < tokens
    of_k, of_v = tl.where(inside, of_k * scale, 0.0), tl.where(inside, of_v, 0.0)
    lane = tl.arange(0, D)
    at = to_ptr + width + key[:, None] * stride + lane[None, :]
    tl.store(at, of_k.to(k.dtype), mask=inside)
    tl.store(at + width, of_v.to(k.dtype), mask=inside)
    tl.store(sums_ptr + width + lane, tl.sum(of_k, 0))
    tl.store(sums_ptr + 2 * width + lane, tl.sum(of_v, 0))


@triton.jit(do_not_specialize=["tokens"])
def _keys_backward(
    joint_ptr, grad_ptr, lse_ptr, level_ptr, to_ptr, sums_ptr, tokens, heads, blocks, rows, scale,
    CAUSAL: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, LAST: tl.constexpr, REST: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    of_head, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    sample, head, width = of_head // heads, of_head % heads, heads * D
    first = block * K
    joint_ptr += sample * tokens * 3 * width + head * D
    to_ptr += sample * tokens * 3 * width + head * D
    grad_ptr += sample * tokens * width + head * D
    lse_ptr += of_head * tokens
    level_ptr += of_head * tokens
    sums_ptr += (sample * rows + block) * 3 * width + head * D
    if LAST < K:
        if first + K > tokens:
            _keys(
                joint_ptr, grad_ptr, lse_ptr, level_ptr, to_ptr, sums_ptr, first, tokens, width, scale,
                CAUSAL, LAST, Q, REST, D,
            )  # fmt: skip
        else:
            _keys(
                joint_ptr, grad_ptr, lse_ptr, level_ptr, to_ptr, sums_ptr, first, tokens, width, scale,
                CAUSAL, K, Q, REST, D,
            )  # fmt: skip
    else:
        _keys(
            joint_ptr, grad_ptr, lse_ptr, level_ptr, to_ptr, sums_ptr, first, tokens, width, scale,
            CAUSAL, K, Q, REST, D,
        )  # fmt: skip


class Tiles(NamedTuple):
    """Sizes in which a kernel does its work."""

    own: int
    """Rows of a program: queries, or keys where it computes their gradients."""
    others: int
    """Rows of the other kind at a time."""
    warps: int
    stages: int
    """Depth of the pipeline of loads."""
    registers: int | None = None
    """Most registers of a thread: fewer let more programs share a multiprocessor."""

    @property
    def options(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


FORWARD = Tiles(64, 64, 4, 3)
QUERIES = Tiles(64, 32, 4, 3)
KEYS = Tiles(64, 32, 4, 3, 128)
"""Fastest of some ten each on an H100, with 129 to 577 tokens."""


def attention(joint: Tensor, heads: int, causal: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Launches `BlockOps.attention`. Its result is kept, and `lse` [B, heads, T] in float32."""
    samples, tokens, width = joint.shape
    lanes = width // (3 * heads)
    out = joint.new_empty(samples, tokens, width // 3)
    lse = joint.new_empty(samples, heads, tokens, dtype=torch.float32)
    tiles, by_query = FORWARD, blocks_of(tokens, FORWARD.own)
    _forward[(samples * heads * by_query,)](
        joint, out, lse, tokens, heads, by_query, lanes**-0.5 * 1.4426950408889634, CAUSAL=causal,
        Q=tiles.own, K=tiles.others, LAST=_last(tokens, tiles.own), REST=_rest(tokens, tiles.others, causal),
        D=lanes, **tiles.options,
    )  # fmt: skip
    return out, (out, lse)


def attention_backward(
    joint: Tensor, out: Tensor, lse: Tensor, grad: Tensor, heads: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Launches `BlockOps.attention_backward`."""
    samples, tokens, width = joint.shape
    lanes = width // (3 * heads)
    of_joint, level = torch.empty_like(joint), torch.empty_like(lse)
    by_query, by_key = (blocks_of(tokens, tiles.own) for tiles in (QUERIES, KEYS))
    rows = max(by_query, by_key)
    sums = torch.zeros(samples, rows, width, dtype=torch.float32, device=joint.device)
    tiles = QUERIES
    _queries_backward[(samples * heads * by_query,)](
        joint, out, grad, lse, level, of_joint, sums, tokens, heads, by_query, rows, lanes**-0.5,
        CAUSAL=causal, Q=tiles.own, K=tiles.others, LAST=_last(tokens, tiles.own),
        REST=_rest(tokens, tiles.others, causal), D=lanes, **tiles.options,
    )  # fmt: skip
    tiles = KEYS
    _keys_backward[(samples * heads * by_key,)](
        joint, grad, lse, level, of_joint, sums, tokens, heads, by_key, rows, lanes**-0.5,
        CAUSAL=causal, K=tiles.own, Q=tiles.others, LAST=_last(tokens, tiles.own),
        REST=_rest(tokens, tiles.others, True), D=lanes, **tiles.options,
    )  # fmt: skip
    return of_joint, sums.sum((0, 1))


def blocks_of(rows: int, of: int) -> int:
    """Returns how many blocks of so many rows hold all rows; triton.cdiv takes as long as a launch."""
    return -(-rows // of)


def power_of_2(number: int) -> int:
    """Returns the least power of two that is not below the number, which is at least 1."""
    return 1 << (number - 1).bit_length()


def _rest(tokens: int, step: int, causal: bool) -> int:
    """Returns the rows of the tile behind all whole ones: 0 for none, 1 for a sum in place of a tile."""
    rest = tokens % step
    return rest if rest == 0 or (rest == 1 and not causal) else max(_LEAST, power_of_2(rest))


def _last(tokens: int, own: int) -> int:
    """Returns the rows that the last program of a head needs."""
    return _rest(tokens, own, causal=True) or own
