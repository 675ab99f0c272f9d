"""Checkpoints of open_clip_train 3.3.0 (src/open_clip_train/main.py): one file with epoch, state_dict, optimizer and perhaps scaler."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.checkpoint.state import put_optimizer
from trainer.errors import InputError


@dataclass(frozen=True)
class Theirs:
    """What such a file says."""

    path: Path
    epoch: int
    """Epochs that are done."""
    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any]
    scaler: Mapping[str, Any]


def read(path: Path) -> Theirs:
    """The file, loaded as weights only. Raises InputError where it is no such checkpoint."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        weights = {name.removeprefix("module."): tensor for name, tensor in content["state_dict"].items()}
        return Theirs(path, int(content["epoch"]), weights, content["optimizer"], content.get("scaler", {}))
    except Exception as error:  # torch.load raises whatever the bytes lead it to
        raise InputError(
            f"checkpoint.resume = {path} is no checkpoint of open_clip_train (a file with epoch, state_dict and optimizer): "
            f"{type(error).__name__}: {error}. Weights alone go to model.pretrained"
        ) from None


def load(theirs: Theirs, model: nn.Module, optimizer: Optimizer) -> None:
    """Weights and optimizer state into ours. Raises InputError where they are another model's."""
    try:
        model.load_state_dict(theirs.weights)
    except RuntimeError as error:
        raise InputError(f"checkpoint.resume = {theirs.path} is of another model: {error}") from None
    names = _optimizer_order(model)
    if sorted(theirs.optimizer["state"]) not in ([], list(range(len(names)))):
        raise InputError(
            f"checkpoint.resume = {theirs.path}: its optimizer has {len(theirs.optimizer['state'])} parameters, not {len(names)}"
        )
    put_optimizer({names[number]: state for number, state in theirs.optimizer["state"].items()}, model, optimizer)


def _optimizer_order(model: nn.Module) -> list[str]:
    """Their optimizer numbers the parameters without decay first, then the others, each in the model's order."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    free = [name for name, p in trained if p.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))]
    return free + [name for name, _ in trained if name not in set(free)]
