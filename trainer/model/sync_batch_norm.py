"""Batch norm over the global batch, on either backend, and also on CPUs.

torch's and Horovod's own raise on CPUs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from trainer.comm.blocks import BATCH_NORMS
from trainer.comm.protocol import Comm
from trainer.errors import InputError
from trainer.internals import copy_all


def has_batch_norm(model: nn.Module) -> bool:
    """Returns whether any part of the model takes statistics over the batch. A locked batch norm does not."""
    return any(_takes_statistics(module) for module in model.modules())


def _takes_statistics(module: nn.Module) -> bool:
    return isinstance(module, BATCH_NORMS) and not isinstance(module, Locked)


class Locked(nn.Module):
    """Mixin for a batch norm: even in training it uses its running statistics and does not change them."""

    def train(self, mode: bool = True) -> "Locked":
        return super().train(False)


def lock_batch_norm(tower: nn.Module) -> None:
    """Locks every batch norm of a locked tower that has no parameter to train; names in the state dict stay.

    open_clip's `freeze_bn_stats` would put torchvision's FrozenBatchNorm2d there, without timm's activation
    and num_batches_tracked.
    """
    for module in tower.modules():
        if _takes_statistics(module) and not any(
            parameter.requires_grad for parameter in module.parameters()
        ):
            module.__class__ = _locked(type(module))  # type: ignore[arg-type]  # classes have a hash
            module.eval()


@cache
def _locked(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Locked{kind.__name__}", (Locked, kind), {})


class RunningStatistics:
    """Running statistics of every batch norm.

    Each forward pass of training changes them, so a step that is left out must put them back. Those of one
    type are copied together: a ResNet-50 has 159 of them.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = [module for module in model.modules() if _takes_statistics(module)]
        buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self._groups = [
            [buffer for buffer in buffers if buffer.dtype == dtype]
            for dtype in dict.fromkeys(buffer.dtype for buffer in buffers)
        ]
        self._are_equal = any(isinstance(norm, SyncBatchNorm | SyncBatchNormAct) for norm in norms)

    def average(self, comm: Comm) -> None:
        """Collective: gives all ranks the mean of their statistics, unless batch norm is synchronised.

        Without it each rank would evaluate and save a model of its own.
        """
        if self._are_equal or comm.world.size == 1:
            return
        for group in (group for group in self._groups if group[0].is_floating_point()):
            _fill(group, comm.all_reduce(_row(group)) / comm.world.size)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Returns a context that ends with the statistics as they are now.

        It is for a backward pass that recomputes activations, whose forward passes would move them again.
        """
        before = self.copy()
        yield
        for group, row in zip(self._groups, before, strict=True):
            _fill(group, row)

    def copy(self) -> list[Tensor]:
        """Returns a copy for `put_back_unless`; empty for a model without batch norm."""
        return [_row(group) for group in self._groups]

    def put_back_unless(self, finite: Tensor, before: list[Tensor]) -> None:
        """Copies the statistics back, in place, if `finite` is false, a scalar on their device."""
        for group, new, old in zip(self._groups, self.copy(), before, strict=True):
            _fill(group, torch.where(finite, new, old))


def _row(group: list[Tensor]) -> Tensor:
    """Returns the values of all buffers in one row, a copy."""
    return torch.cat([buffer.view(-1) for buffer in group])


def _fill(group: list[Tensor], row: Tensor) -> None:
    """Copies a row that `_row` could have made into the buffers."""
    parts = row.split([buffer.numel() for buffer in group])
    copy_all(group, [part.view_as(buffer) for part, buffer in zip(parts, group, strict=True)])


def synchronise_batch_norm(model: nn.Module, comm: Comm) -> None:
    """Makes every batch norm take its statistics over all ranks; names in the state dict stay as they are.

    Raises InputError for an unknown kind of batch norm.
    """
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            if _takes_statistics(child):
                setattr(module, child_name, _synchronised(child, comm, f"{name}.{child_name}".lstrip(".")))


def _synchronised(norm: nn.Module, comm: Comm, name: str) -> nn.Module:
    kinds: dict[type[nn.Module], type[nn.Module]] = {
        nn.BatchNorm1d: SyncBatchNorm,
        nn.BatchNorm2d: SyncBatchNorm,
        nn.BatchNorm3d: SyncBatchNorm,
        BatchNormAct2d: SyncBatchNormAct,
    }
    kind = kinds.get(type(norm))
    if kind is None:
        raise InputError(
            f"model.sync_batch_norm does not support {type(norm).__name__} at {name}: "
            "set it to false, or choose another model"
        )
    replacement = kind.__new__(kind)
    replacement.__dict__.update(norm.__dict__)
    replacement.comm = comm  # type: ignore[assignment]  # not a module: kept out of the state dict
    return replacement


class SyncBatchNorm(nn.BatchNorm1d):
    """Replaces a torch batch norm. The input is [B, C, ...]; B is the same on all ranks."""

    comm: Comm

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2:
            raise ValueError(f"expected [batch, channels, ...], got {tuple(x.shape)}")
        if self.training:
            return normalise(self, x)
        mean, variance = self.running_mean, self.running_var
        return F.batch_norm(x, mean, variance, self.weight, self.bias, mean is None, eps=self.eps)


class SyncBatchNormAct(BatchNormAct2d):
    """Replaces timm's batch norm with activation."""

    comm: Comm

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]
        return self.act(self.drop(normalise(self, x)))  # type: ignore[no-any-return]


def normalise(norm: Any, x: Tensor) -> Tensor:
    """Normalises with the statistics of all ranks and updates the running ones, which `norm` has.

    `norm` has the parameters and buffers of a torch batch norm, and `comm`. C: channels; W: ranks.
    Collective, and so is its backward pass.
    """
    if x.is_cuda:
        return _OnGpu.apply(x, norm.weight, norm.bias, norm)  # type: ignore[no-any-return]
    count = x.numel() // x.shape[1] * norm.comm.world.size
    with torch.no_grad():
        mean_C, variance_C = statistics(norm.comm, _wide(x))
        _move_running(norm, mean_C, variance_C * (count / max(count - 1, 1)))
    affine = (norm.weight, norm.bias) if norm.affine else (torch.ones_like(mean_C), torch.zeros_like(mean_C))
    normal: Tensor = _Normalised.apply(x, mean_C, variance_C, *affine, norm.eps, norm.comm)
    return normal


def statistics(comm: Comm, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and variance of each channel over the samples of all ranks, each [C]. Collective.

    x: [B, C, ...]. The variance is the mean of the ranks' variances plus the variance of their means: no sum
    of squares is formed, which would lose digits.
    """
    own_C, mean_C = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    all_W2C = comm.all_gather(torch.stack([own_C, mean_C])[None])
    between_C, whole_C = torch.var_mean(all_W2C[:, 1], 0, correction=0)
    return whole_C, all_W2C[:, 0].mean(0) + between_C


class _Normalised(torch.autograd.Function):
    """Batch norm with given statistics, whose gradient knows that they follow from the input of all ranks.

    Both passes use torch's own kernels for fixed statistics. The backward pass adds what goes through mean
    and variance: dx = w / s (dy - sum(dy) / N - y sum(dy y) / N), y normalised, sums over all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean_C: Tensor,
        variance_C: Tensor,
        weight_C: Tensor,
        bias_C: Tensor,
        eps: float,
        comm: Comm,
    ) -> Tensor:
        ctx.save_for_backward(x, mean_C, variance_C, weight_C)
        ctx.eps, ctx.comm = eps, comm
        weight_C, bias_C = weight_C.to(mean_C.dtype), bias_C.to(mean_C.dtype)
        return F.batch_norm(_wide(x), mean_C, variance_C, weight_C, bias_C, False, 0.0, eps).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean_C, variance_C, weight_C = ctx.saved_tensors
        wide, weight_wide_C = _wide(x), weight_C.to(mean_C.dtype)
        dx, dweight_C, dbias_C = torch.ops.aten.native_batch_norm_backward(
            _wide(grads[0]),
            wide,
            weight_wide_C,
            mean_C,
            variance_C,
            None,
            None,
            False,
            ctx.eps,
            [True, True, True],
        )
        sums_2C = ctx.comm.all_reduce(torch.stack([dweight_C, dbias_C]))
        count = x.numel() // x.shape[1] * ctx.comm.world.size
        scale_C = weight_wide_C * torch.rsqrt(variance_C + ctx.eps) / -count
        through_2C = sums_2C * scale_C
        dx += F.batch_norm(wide, mean_C, variance_C, through_2C[0], through_2C[1], False, 0.0, ctx.eps)
        to = weight_C.dtype
        return dx.to(x.dtype), None, None, dweight_C.to(to), dbias_C.to(to), None, None


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _move_running(norm: Any, mean_C: Tensor, unbiased_C: Tensor) -> None:
    if not _has_running(norm):
        return
    weight = _counted_momentum(norm)
    norm.running_mean.lerp_(mean_C.to(norm.running_mean.dtype), weight)
    norm.running_var.lerp_(unbiased_C.to(norm.running_var.dtype), weight)


def _memory_format(x: Tensor) -> torch.memory_format:
    """Returns in which order the elements of x, [B, C, ...], lie in memory."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


class _OnGpu(torch.autograd.Function):
    """The same in the kernels of torch's SyncBatchNorm, which asks for torch.distributed itself.

    Half precision is read as it is, and summed in float32. Every rank has as many samples as this one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, norm: Any) -> Tensor:
        ctx.format = _memory_format(x)
        x = x.contiguous(memory_format=ctx.format)
        comm = norm.comm
        all_W2C = comm.all_gather(torch.stack(torch.batch_norm_stats(x, norm.eps))[None])
        counts = _counts(x.numel() // x.shape[1], comm.world.size, all_W2C.dtype, x.device)
        tracked = _has_running(norm)
        mean_C, scale_C = torch.batch_norm_gather_stats_with_counts(
            x,
            all_W2C[:, 0],
            all_W2C[:, 1],
            norm.running_mean if tracked else None,
            norm.running_var if tracked else None,
            _counted_momentum(norm) if tracked else 0.0,
            norm.eps,
            counts[0],
        )
        ctx.save_for_backward(x, weight_C, mean_C, scale_C)
        ctx.comm, ctx.counts = comm, counts[1]
        return torch.batch_norm_elemt(x, weight_C, bias_C, mean_C, scale_C, norm.eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_C, mean_C, scale_C = ctx.saved_tensors
        dy = grads[0].contiguous(memory_format=ctx.format)
        wanted = [needed and weight_C is not None for needed in ctx.needs_input_grad[1:3]]
        *sums_2, dweight_C, dbias_C = torch.batch_norm_backward_reduce(
            dy, x, mean_C, scale_C, weight_C, True, *wanted
        )
        sums_2C = ctx.comm.all_reduce(torch.stack(sums_2))
        dx = torch.batch_norm_backward_elemt(
            dy, x, mean_C, scale_C, weight_C, sums_2C[0], sums_2C[1], ctx.counts
        )
        return dx, dweight_C if wanted[0] else None, dbias_C if wanted[1] else None, None


@cache
def _counts(count: int, ranks: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the number of a channel's values on each rank, [W], in the type of statistics and in int32."""
    counts_W = torch.full((ranks,), count, dtype=dtype, device=device)
    return counts_W, counts_W.to(torch.int32)


def _has_running(norm: Any) -> bool:
    return norm.track_running_stats and norm.running_mean is not None and norm.running_var is not None


def _counted_momentum(norm: Any) -> float:
    """Counts one more batch, and returns the weight of its statistics."""
    norm.num_batches_tracked.add_(1)
    return norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
