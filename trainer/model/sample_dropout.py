"""Dropout as a function of seed, epoch and position.

A sample loses the same parts on any rank and in every pass. That holds in any micro-batch too. Each layer
draws from a hash of (sample's key, layer, element) instead of a generator's stream. Dropout inside a fused
attention kernel cannot be reached from here; it follows torch's generator, which a step seeds by its
micro-batch, and so repeats only for micro-batches of one size.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from open_clip.transformer import PatchDropout
from timm.layers.drop import DropPath
from timm.layers.patch_dropout import PatchDropout as TimmPatchDropout
from timm.layers.pos_embed_rel import RelPosMlp
from torch import Tensor, nn

from trainer.comm.host_memory import to_device

log = logging.getLogger("clipship")


class SampleKeys:
    """Keys of the samples in the current forward pass; the layers of one model share them."""

    def __init__(self) -> None:
        self.keys_B = torch.zeros(0, dtype=torch.int64)
        self.used = False
        """True if the model has a layer that draws."""

    def put(self, keys: Iterable[int], device: torch.device) -> None:
        """Replaces the keys by those of the samples in the next forward pass, in order."""
        if self.used:
            self.keys_B = to_device(torch.tensor(list(keys), dtype=torch.int64), device)


def draw_by_sample(model: nn.Module) -> SampleKeys:
    """Makes the model's dropout layers draw by sample; `put` their keys before each forward pass.

    Evaluation mode draws nothing.
    """
    keys = SampleKeys()
    _keep_tables_whole(model)
    for number, module in enumerate(model.modules()):
        kind = _KINDS.get(type(module))
        if kind is not None:
            module.__class__ = kind  # the instance keeps its settings, hooks and names
            module._keys, module._number = keys, number  # type: ignore[assignment]
            keys.used |= any(getattr(module, name, None) for name in _RATES)
    return keys


def _keep_tables_whole(model: nn.Module) -> None:
    """Turns off dropout of timm's tables of relative positions, which all samples share."""
    tables = [module for module in model.modules() if isinstance(module, RelPosMlp)]
    layers = [layer for table in tables for layer in table.modules() if isinstance(layer, nn.Dropout)]
    dropped = [layer for layer in layers if layer.p > 0]
    for layer in dropped:
        layer.p = 0.0
    if dropped:
        log.info("%-12s dropout of the table of relative positions is off: all samples share it", "model")


class _Drawing(nn.Module):
    _keys: SampleKeys
    _number: int

    def uniform(self, samples: int, count: int, device: torch.device) -> Tensor:
        """Returns [samples, count] float32 in [0, 1)."""
        keys_B = self._keys.keys_B.to(device)  # it is there already, if `put` was told the device
        if len(keys_B) != samples:
            raise RuntimeError(f"{len(keys_B)} sample keys for a batch of {samples}")
        return hashed_uniform(keys_B, self._number, count)


class _Dropout(_Drawing, nn.Dropout):
    """Dropout by sample; the input is [B, ...]."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        kept = self.uniform(len(x), x[0].numel(), x.device).view_as(x) >= self.p
        return x * kept / (1 - self.p)


class _DropPath(_Drawing, DropPath):
    """Drops the whole branch of a sample; the input is [B, ...]."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.drop_prob:
            return x
        kept = (self.uniform(len(x), 1, x.device) >= self.drop_prob).view(-1, *[1] * (x.dim() - 1))
        scale = 1 - self.drop_prob if self.scale_by_keep and self.drop_prob < 1 else 1.0
        return x * kept / scale


class _PatchDropout(_Drawing, PatchDropout):  # type: ignore[misc]  # open_clip has no types
    """Drops patches by sample; the input is [B, tokens, width] (arXiv 2212.00794)."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            _some_patches(self, x, self.prob, 1 if self.exclude_first_token else 0)
            if self.training and self.prob
            else x
        )


class _TimmPatchDropout(_Drawing, TimmPatchDropout):
    """Drops patches by sample in timm's models; the input is [B, tokens, width]."""

    def forward(self, x: Tensor) -> Tensor:
        return (
            _some_patches(self, x, self.prob, self.num_prefix_tokens, self.ordered)
            if self.training and self.prob
            else x
        )


_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: _Dropout,
    DropPath: _DropPath,
    PatchDropout: _PatchDropout,
    TimmPatchDropout: _TimmPatchDropout,
}


_RATES = ("p", "drop_prob", "prob")
"""Names that these kinds have for the share which they drop."""


def _some_patches(layer: _Drawing, x: Tensor, dropped: Any, prefix: int, ordered: bool = False) -> Tensor:
    patches_BTD = x[:, prefix:]
    samples, tokens, width = patches_BTD.shape
    left = max(1, int(tokens * (1 - dropped)))
    chosen_BL = layer.uniform(samples, tokens, x.device).topk(left, dim=1).indices
    if ordered:
        chosen_BL = chosen_BL.sort(dim=1).values
    return torch.cat(
        [x[:, :prefix], patches_BTD.gather(1, chosen_BL[:, :, None].expand(-1, -1, width))], dim=1
    )


def hashed_uniform(keys_B: Tensor, layer: int, count: int) -> Tensor:
    """Returns [B, count] float32 in [0, 1), a hash of key, layer and element, the same on every device.

    The hash is SplitMix64 (Steele et al., OOPSLA 2014).
    """
    element_C = torch.arange(count, dtype=torch.int64, device=keys_B.device)
    # The layer's number stays on the host and is an argument of the kernel: a copy would make the host wait.
    state = (
        _mixed(keys_B[:, None] ^ _mixed(torch.tensor(layer + 1) * _GOLDEN)) + (element_C + 1)[None] * _GOLDEN
    )
    return (_logical_shift(_mixed(state), 40)).to(torch.float32) / 2**24


def _mixed(state: Tensor) -> Tensor:
    """Mixes the bits. int64 arithmetic wraps around, as the algorithm needs."""
    state = (state ^ _logical_shift(state, 30)) * -4658895280553007687
    state = (state ^ _logical_shift(state, 27)) * -7723592293110705685
    return state ^ _logical_shift(state, 31)


def _logical_shift(state: Tensor, bits: int) -> Tensor:
    return (state >> bits) & ((1 << (64 - bits)) - 1)


_GOLDEN = -7046029254386353131
