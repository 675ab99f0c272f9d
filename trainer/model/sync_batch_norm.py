"""Batch norm over the global batch, on either backend, and also on CPUs.

torch's and Horovod's own raise on CPUs.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from trainer.comm.protocol import Comm
from trainer.errors import InputError


def has_batch_norm(model: nn.Module) -> bool:
    """Returns whether any part of the model takes statistics over the batch. A locked batch norm does not."""
    return any(_takes_statistics(module) for module in model.modules())


def _takes_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, Locked)


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

    Each forward pass of training changes them, so a step that is left out must put them back.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = [module for module in model.modules() if _takes_statistics(module)]
        self._buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]

    def copy(self) -> list[Tensor]:
        """Returns a copy for `put_back`; empty for a model without batch norm."""
        return [buffer.clone() for buffer in self._buffers]

    def put_back_unless(self, finite: Tensor, before: list[Tensor]) -> None:
        """Copies the statistics back, in place, if `finite` is false, a scalar on their device."""
        for buffer, old in zip(self._buffers, before, strict=True):
            torch.where(finite, buffer, old, out=buffer)


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


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Replaces a torch batch norm. The input is [B, C, ...]; B is the same on all ranks."""

    comm: Comm

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"expected [batch, channels, ...], got {tuple(x.shape)}")

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        return _normalise(self, x) if self.training else super().forward(x)


class SyncBatchNormAct(BatchNormAct2d):
    """Replaces timm's batch norm with activation."""

    comm: Comm

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]
        return self.act(self.drop(_normalise(self, x)))  # type: ignore[no-any-return]


def _normalise(norm: SyncBatchNorm | SyncBatchNormAct, x: Tensor) -> Tensor:
    """Normalises with the statistics of all ranks and updates the running ones.

    Collective, and so is its backward pass.
    """
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


def _move_running(norm: SyncBatchNorm | SyncBatchNormAct, mean_C: Tensor, unbiased_C: Tensor) -> None:
    if not norm.track_running_stats or norm.running_mean is None or norm.running_var is None:
        return
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    weight = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
    norm.running_mean.lerp_(mean_C.to(norm.running_mean.dtype), weight)
    norm.running_var.lerp_(unbiased_C.to(norm.running_var.dtype), weight)
