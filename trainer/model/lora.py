"""Low-rank adapters (LoRA, arXiv 2106.09685): small matrices that are trained beside weights that stay fixed.

Where a module's forward pass reads its weight W it gets W + (alpha / rank) B A. W keeps its name and its
bits; A and B lie beside it. So each form of a forward pass, kernel or compiler works as without them, and
gradients, their reduction and the optimizer's state exist for A and B alone. B begins with zeros: before the
first step the model is the one that was loaded.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from trainer.comm.blocks import repeated_blocks
from trainer.config import Model
from trainer.errors import InputError
from trainer.model.layer_numbers import TOWERS
from trainer.text.wording import many

FACTORS = _DOWN, _UP = "lora_A", "lora_B"
"""Names beside the weight of A [rank, in] and B [out, rank]."""
SCALE = "lora_scale"
"""Name of alpha / rank beside them."""
_JOINT, _LINEAR = "in_proj_weight", "weight"
"""Names of weights that can be adapted: queries, keys and values of attention as one; a linear layer's."""


def adapt(model: nn.Module, settings: Model, seed: int) -> tuple[str, ...]:
    """Gives the towers that the settings name their adapters, A from the seed; returns a sentence about them.

    The weights must be frozen, have their place and type already, and kernels be chosen. Raises InputError
    for a tower that has no such weight, and for a pattern that fits none.
    """
    if settings.lora_rank is None:
        return ()
    weights = [weight for weight in _weights(model) if settings.lora[weight.tower]]
    chosen, draw = _chosen(weights, settings), torch.Generator().manual_seed(seed)
    added = sum(_add(weight, settings, draw) for weight in chosen)
    return (f"LoRA of rank {settings.lora_rank} beside {many(len(chosen), 'weight')}: {added:,} parameters",)


def is_drawn(name: str) -> bool:
    """Returns whether a parameter of this name is A of an adapter, which begins at random.

    B begins with zeros, so that a share of B alone is that share of what was learned.
    """
    return name.rpartition(".")[2] == _DOWN


def merged(weight: Tensor, down: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    """Returns W + scale B A, in the type of the weights."""
    with torch.autocast(weight.device.type, enabled=False):
        return torch.addmm(weight, up * scale, down)


def without_adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a state dict by the names of a plain model, adapters added to their weights."""
    plain = dict(tensors)
    for name in tensors:
        if name.rpartition(".")[2] == SCALE:
            place = name.removesuffix(SCALE)
            parts = [plain.pop(place + part) for part in (*FACTORS, SCALE)]
            weight = name_beside(place, plain)
            plain[weight] = merged(plain[weight], *parts)
    return plain


def name_beside(place: str, tensors: Mapping[str, Tensor]) -> str:
    """Returns the name of the weight that is adapted in a module; `place` is its name with a dot."""
    return place + (_JOINT if place + _JOINT in tensors else _LINEAR)


@dataclass(frozen=True)
class _Weight:
    """A weight that can be adapted."""

    name: str
    module: nn.Module
    key: str
    """Name of the weight within its module."""

    @property
    def tower(self) -> int:
        """0 for the image tower, 1 for the text tower."""
        return int(not self.name.startswith("visual."))


def _weights(model: nn.Module) -> Iterator[_Weight]:
    """Yields the linear weights in the blocks that towers repeat."""
    inside = {id(module) for block in repeated_blocks(model) for module in block.modules()}
    for place, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            linear = key == _JOINT or (key == _LINEAR and isinstance(module, nn.Linear))
            if linear and id(module) in inside and parameter.ndim == 2:
                yield _Weight(f"{place}.{key}", module, key)


def _chosen(weights: list[_Weight], settings: Model) -> list[_Weight]:
    """Returns the weights that fit a pattern; raises InputError if one fits none, or a tower has none."""
    patterns = settings.lora_targets or ("*",)
    for pattern in patterns:
        if weights and not any(fnmatchcase(weight.name, pattern) for weight in weights):
            raise InputError(
                f"model.lora_targets: {pattern!r} fits no weight of {settings.name} that LoRA can adapt: "
                f"give patterns of names such as {weights[0].name} and {weights[-1].name}"
            )
    chosen = [weight for weight in weights if any(fnmatchcase(weight.name, each) for each in patterns)]
    for number, tower in enumerate(TOWERS):
        if settings.lora[number] and all(weight.tower != number for weight in chosen):
            raise InputError(
                f"model.lora_towers: the {tower} tower of {settings.name} has no linear weight in its blocks"
                f"{' that fits model.lora_targets' * bool(settings.lora_targets)}, so nothing of it would "
                "learn: choose the other tower, or another model"
            )
    return chosen


def _add(weight: _Weight, settings: Model, draw: torch.Generator) -> int:
    """Returns the number of parameters that it adds."""
    module, rank = weight.module, settings.lora_rank or 0
    own = module.get_parameter(weight.key)
    down = torch.empty(rank, own.shape[1])
    nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=draw)
    module.register_parameter(_DOWN, nn.Parameter(down.to(own)))
    module.register_parameter(_UP, nn.Parameter(own.new_zeros(len(own), rank)))
    module.register_buffer(SCALE, own.new_tensor(settings.lora_scale))
    # The instance keeps its settings, hooks and names.
    module.__class__ = _adapted(type(module), weight.key)  # type: ignore[arg-type]
    return rank * sum(own.shape)


@cache
def _adapted(kind: type[nn.Module], key: str) -> type[nn.Module]:
    """Returns the class of modules of a kind whose weight is adapted."""
    return type(kind.__name__, (kind,), {key: property(_read(key))})


def _read(key: str) -> Callable[[Any], Tensor]:
    def read(module: Any) -> Tensor:
        weight: Tensor = module._parameters[key]
        if type(weight) is not nn.Parameter:  # rows that FSDP holds between two passes, and asks for itself
            return weight
        return merged(weight, module.lora_A, module.lora_B, module.lora_scale)

    return read
