"""Numbers the layers of a model's two towers from their begin, for learning rates that differ by depth."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from timm.models import group_parameters
from torch import nn

Tower = Literal["image", "text"]
TOWERS: Sequence[Tower] = get_args(Tower)

_LOGITS = ("logit_scale", "logit_bias")
_IMAGE = "visual."
_TRUNK = "visual.trunk."
_BLOCK = re.compile(r"\.(?:resblocks|blocks|layers|layer|block)\.(\d+)\.|\.layer(\d+)\.(\d+)\.")
"""Blocks of transformers, and of ResNets, which have several stages."""
_DECODER = "text_decoder."
"""CoCa's, which reads what comes out of both towers."""
_BEHIND = re.compile(
    r"^(visual\.|text\.)?(transformer\.)?"
    r"(proj|ln_post|ln_final|text_projection|attnpool|attn_pool|head|pool\b|pooler|final_norm"
    r"|final_layer_norm)|" + re.escape(_DECODER)
)
"""Names of parameters that come behind the blocks."""


@dataclass(frozen=True)
class Layer:
    """Place of a parameter in its tower."""

    tower: Tower
    number: int
    """0: what is before the blocks; then one number for each block; then what is behind them."""
    last: int
    """Number of the layer behind the blocks."""


def tower_of(name: str) -> Tower | None:
    """Returns the tower of a parameter; None for the logit scale and bias.

    All that is neither the image tower's nor the logits' counts as the text tower's.
    """
    if name in _LOGITS:
        return None
    return "image" if name.startswith(_IMAGE) else "text"


def layers_of(model: nn.Module) -> Mapping[str, Layer]:
    """Returns the layer of each parameter by its name; the logit scale and bias belong to none.

    In the text tower the decoder of a CoCa model, cross-attention included, is behind the blocks. Image
    towers of timm are numbered as timm does, which the learning rates of its `param_groups_layer_decay`
    follow, too.
    """
    by_timm = _by_timm(model)
    layers: dict[str, Layer] = {}
    for tower in TOWERS:
        names = [name for name, _ in model.named_parameters() if tower_of(name) == tower]
        numbers = _by_name(names) | {name: by_timm[name] for name in names if name in by_timm}
        last = max(numbers.values(), default=0)
        layers |= {name: Layer(tower, number, last) for name, number in numbers.items()}
    return layers


def _by_name(names: Sequence[str]) -> dict[str, int]:
    """Returns the number of each parameter's layer in its tower, from the names of blocks."""
    blocks = sorted({block for name in names if (block := _block(name)) is not None})
    ends = {False: 0, True: len(blocks) + 1}
    return {
        name: ends[bool(_BEHIND.match(name))] if (block := _block(name)) is None else blocks.index(block) + 1
        for name in names
    }


def _block(name: str) -> tuple[int, ...] | None:
    match = None if name.startswith(_DECODER) else _BLOCK.search(name)
    return None if match is None else tuple(int(number) for number in match.groups() if number is not None)


def _by_timm(model: nn.Module) -> dict[str, int]:
    """Returns the numbers of timm's image tower, and of the projection behind it; empty for other towers."""
    trunk = getattr(getattr(model, "visual", None), "trunk", None)
    if trunk is None or not hasattr(trunk, "group_matcher"):
        return {}
    numbers = group_parameters(trunk, trunk.group_matcher(coarse=False), reverse=True)
    last = max(numbers.values(), default=0)
    behind = {
        name: last
        for name, _ in model.named_parameters()
        if name.startswith(_IMAGE) and not name.startswith(_TRUNK)
    }
    return {f"{_TRUNK}{name}": number for name, number in numbers.items()} | behind
