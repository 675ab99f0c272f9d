"""The optimizer of the job, over groups of parameters: with and without decay, with a learning rate each."""

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.comm.shards import Shards
from trainer.config import Optim
from trainer.config.optimizers import OPTIMIZERS, OptimizerName
from trainer.internals import found_inf, leaves_out_by_itself
from trainer.model.layer_numbers import Layer


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


_COUNT, _NOTE = "step", "use_muon"


def keep_exactly(optimizer: Optimizer, name: OptimizerName) -> Optimizer:
    """Returns the optimizer, whose state is tensors of parameters alone between two steps.

    LAMB counts the steps of a group, and Muon notes for each parameter whether it is a matrix, which its
    group says, too. Hooks before and after each step move that, so that checkpoints give it back.
    """
    for register, hooks in (
        (optimizer.register_step_pre_hook, _BEFORE),
        (optimizer.register_step_post_hook, _AFTER),
    ):
        if name in hooks:
            register(lambda changed, *_, hook=hooks[name]: hook(changed))
    return optimizer


def _take_counts(optimizer: Optimizer) -> None:
    """Gives each group the count of its parameters; one that has none begins."""
    for group in optimizer.param_groups:
        counts = [state[_COUNT] for state in _states(optimizer, group) if _COUNT in state]
        if counts:
            group[_COUNT] = torch.stack(counts).max()


def _give_counts(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        count = group.pop(_COUNT)
        for state in _states(optimizer, group):
            state.setdefault(_COUNT, torch.zeros(())).fill_(count)


def _drop_notes(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state.pop(_NOTE, None)


def _states(optimizer: Optimizer, group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the states of the group's parameters that have been updated."""
    return [optimizer.state[each] for each in group["params"] if optimizer.state.get(each)]


_BEFORE: Mapping[str, Callable[[Optimizer], None]] = {"lamb": _take_counts}
_AFTER: Mapping[str, Callable[[Optimizer], None]] = {"lamb": _give_counts, "muon": _drop_notes}


def clip_gradients(shards: Shards, limit: float | None) -> Tensor:
    """Returns the norm of the whole gradient, a scalar, after scaling a larger gradient down to the limit.

    None sets no limit. Collective if the parameters are split over the ranks.
    """
    norm = shards.grad_norm()
    if limit is not None:
        parameters = [parameter for parameter in shards.parameters.values() if parameter.grad is not None]
        nn.utils.clip_grads_with_norm_(parameters, limit, norm, foreach=True)
    return norm


def update_if(finite: Tensor, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Runs one step of the optimizer, which changes nothing if `finite` is false, a scalar on the device.

    The scaler's factor then falls by one step. The scaler has unscaled the gradients already. A fused
    optimizer leaves the step out by itself, step counts included, so the host need not wait for a GPU. Others
    are not called for such a step; the host waits until it knows whether it is one.
    """
    skip = (~finite).to(torch.float32)
    if scaler.is_enabled():
        # The scaler checks single elements. Elements that are all finite can have a norm that float32 cannot
        # hold, and an element that is not makes the norm so.
        for mark in found_inf(scaler, optimizer):
            mark.copy_(skip)
        scaler.step(optimizer)
        scaler.update()
        return
    if not leaves_out_by_itself(optimizer):
        if finite:
            optimizer.step()
        return
    fused: Any = optimizer
    fused.grad_scale, fused.found_inf = None, skip  # as GradScaler tells a fused optimizer
    try:
        optimizer.step()
    finally:
        del fused.grad_scale, fused.found_inf
