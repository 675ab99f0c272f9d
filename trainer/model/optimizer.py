"""The optimizer of the job, over groups of parameters: with and without decay, with a learning rate each."""

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from torch import nn
from torch.optim import Optimizer

from trainer.config import Optim
from trainer.config.optimizers import OPTIMIZERS
from trainer.model.layer_numbers import Layer
from trainer.model.optimizer_state import keep_exactly


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], settings: Optim, layers: Mapping[str, Layer] | None = None
) -> Optimizer:
    """Returns the job's optimizer over the trained parameters; see `parameter_groups`.

    `layers` are needed where learning rates differ by tower or depth.
    """
    row = OPTIMIZERS[settings.optimizer]
    groups = parameter_groups(parameters, settings, layers or {})
    arguments = row.arguments(settings.beta1, settings.beta2, settings.eps)
    if not row.factory:
        # The fused kernel serves all parameters at once, and leaves a step out without asking the host.
        return torch.optim.AdamW(groups, lr=settings.lr, fused=True, **arguments)
    made = create_optimizer_v2(
        groups, row.factory, lr=settings.lr, weight_decay=settings.weight_decay, **arguments
    )
    return keep_exactly(made, settings.optimizer)


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """Sets the learning rate of each group: the value times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = value * group[LR_SCALE]


_SPARED = ("bn", "ln", "bias", "logit_scale")
_FACTORS = ("weight", "proj", "lora")
"""Parts of the last word in names of what layers multiply by; positions, biases and queries lack them."""
_TABLES = (
    "*embed*",
    "*.shared.weight",
    "*.wte.weight",
    "*.wpe.weight",
    "*.relative_attention_bias.weight",
    "text_decoder.text_projection",
)
"""Names of tables of embeddings, for which T5 and GPT-2 have words of their own, and of the matrix by which
CoCa's decoder chooses words: Muon's author leaves both to AdamW.
"""
LR_SCALE = "lr_scale"
"""Key of a group: factor of its learning rate."""
ANCHOR = "anchor"
"""Key of a group: pull of its parameters to the first weights (`trainer.model.anchor`)."""


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
            ANCHOR: settings.anchor if decay else 0.0,
            LR_SCALE: scale,
            **({"use_muon": matrix, "nesterov": matrix} if by_matrix else {}),
        }
        for decay, scale, matrix in sorted(groups, key=lambda key: (not key[0], -key[1], not key[2]))
    ]


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Returns whether a hidden layer multiplies by the parameter: two dimensions, and no table."""
    return (
        parameter.ndim == 2
        and any(part in name.rpartition(".")[2] for part in _FACTORS)
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in _TABLES)
    )


def decays(name: str, parameter: nn.Parameter, settings: Optim) -> bool:
    """Returns whether weight decay and the anchor act on the parameter.

    They spare gains, biases and the logit scale, which have at most one dimension, and tables of biases,
    which have more (Swin's `relative_position_bias_table`). The rule is that of open_clip_train's main.py,
    names included; `optim.no_decay` spares more.
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
