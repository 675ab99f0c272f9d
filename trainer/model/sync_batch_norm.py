"""Batch norm over the global batch, on either backend, and also on CPUs.

torch's and Horovod's own raise on CPUs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from trainer.comm.blocks import BATCH_NORMS
from trainer.comm.protocol import Comm
from trainer.errors import InputError
from trainer.internals import copy_all
from trainer.model.batch_norm_math import normalise


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
