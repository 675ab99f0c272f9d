"""Groups of parameters that the optimizer treats alike: with and without decay, with a learning rate."""

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn

from trainer.config import Optim
from trainer.config.optimizers import OPTIMIZERS
from trainer.model.layer_numbers import Layer

_SPARED = ("bn", "ln", "bias", "logit_scale")
_TABLES = ("embed", "bias_table")
"""Parts of the names of tables, whose rows are looked up or added."""
LR_SCALE = "lr_scale"
"""Key of a group: factor of its learning rate."""


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], settings: Optim, layers: Mapping[str, Layer]
) -> list[dict[str, Any]]:
    """Returns the groups of the trained parameters, those with decay first.

    `parameters` has those of a model by their names; of each, it may have a part of the rows alone.
    """
    by_matrix = OPTIMIZERS[settings.optimizer].by_matrix
    groups: dict[tuple[bool, float, bool], list[nn.Parameter]] = {
        (True, 1.0, False): [],
        (False, 1.0, False): [],
    }
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            decay, scale = decays(name, parameter, settings), lr_scale(layers.get(name), settings)
            groups.setdefault((decay, scale, by_matrix and is_matrix(name, parameter)), []).append(parameter)
    return [
        {
            "params": groups[decay, scale, matrix],
            "weight_decay": settings.weight_decay if decay else 0.0,
            LR_SCALE: scale,
            **({"use_muon": matrix, "nesterov": matrix} if by_matrix else {}),
        }
        for decay, scale, matrix in sorted(groups, key=lambda key: (not key[0], -key[1], not key[2]))
    ]


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Returns whether a layer multiplies by the parameter: two dimensions, and no table."""
    return parameter.ndim == 2 and not any(part in name for part in _TABLES)


def decays(name: str, parameter: nn.Parameter, settings: Optim) -> bool:
    """Returns whether weight decay acts on the parameter.

    It spares gains, biases and the logit scale, which have at most one dimension, and tables of biases, which
    have more (Swin's `relative_position_bias_table`). The rule is that of open_clip_train's main.py, names
    included; `optim.no_decay` spares more.
    """
    if parameter.ndim < 2 or any(part in name for part in _SPARED):
        return False
    return not any(fnmatch.fnmatchcase(name, pattern) for pattern in settings.no_decay)


def lr_scale(layer: Layer | None, settings: Optim) -> float:
    """Returns the factor of a parameter's learning rate; None is the layer of the logit scale and bias."""
    if layer is None:
        return 1.0
    peak, decay = {
        "image": (settings.image_lr, settings.image_layer_decay),
        "text": (settings.text_lr, settings.text_layer_decay),
    }[layer.tower]
    return (1.0 if peak is None else peak / settings.lr) * decay ** (layer.last - layer.number)
