"""Reads checkpoints of open_clip_train 3.3.0 (src/open_clip_train/main.py).

Such a file holds epoch, state_dict, optimizer and perhaps scaler.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.state import TrainState, WholeState, put_weights
from trainer.checkpoint.weights import cause
from trainer.errors import InputError


@dataclass(frozen=True)
class OpenClipCheckpoint:
    """Contents of a checkpoint of open_clip_train."""

    path: Path
    epoch: int
    """Number of epochs that are done."""
    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any]
    scaler: Mapping[str, Any]


def read(path: Path) -> OpenClipCheckpoint:
    """Returns the file's contents, loaded as weights only. Raises InputError if it is no such checkpoint."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        weights = {name.removeprefix("module."): tensor for name, tensor in content["state_dict"].items()}
        return OpenClipCheckpoint(
            path, int(content["epoch"]), weights, content["optimizer"], content.get("scaler", {})
        )
    except Exception as error:  # damaged bytes can make torch.load raise anything
        raise InputError(
            f"checkpoint.resume = {path} is not a checkpoint of open_clip_train (a file with epoch, "
            "state_dict and optimizer): "
            f"{cause(error)}. To load weights alone, set model.pretrained."
        ) from None


def whole_state(checkpoint: OpenClipCheckpoint, train: TrainState) -> WholeState:
    """Returns the contents by our names, the weights put into the model.

    Raises InputError if they are another model's.
    """
    try:
        put_weights(checkpoint.weights, train)
    except RuntimeError as error:
        raise InputError(f"checkpoint.resume = {checkpoint.path} belongs to another model: {error}") from None
    names = _optimizer_order(train.model)
    if sorted(checkpoint.optimizer["state"]) not in ([], list(range(len(names)))):
        raise InputError(
            f"checkpoint.resume = {checkpoint.path}: its optimizer has "
            f"state for {len(checkpoint.optimizer['state'])} parameters, but this model trains {len(names)}"
        )
    by_name = {names[number]: state for number, state in checkpoint.optimizer["state"].items()}
    return WholeState(checkpoint.weights, by_name, checkpoint.scaler)


def _optimizer_order(model: nn.Module) -> list[str]:
    """Returns the parameters in the order of open_clip_train's optimizer.

    That order is first those without decay, then the others, each in the model's order.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    free = [
        name
        for name, p in trained
        if p.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
    ]
    return free + [name for name, _ in trained if name not in set(free)]
