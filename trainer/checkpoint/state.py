"""Contents of a checkpoint: weights, optimizer and scaler, as tensors and plain values.

Loading them never runs code. There is no random state to keep: augmentation, captions and dropout are
functions of seed, epoch and position, the learning rate is a function of the step, and the step gives the
data position.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.files import WEIGHTS, BrokenCheckpoint
from trainer.checkpoint.weights import cause

State = dict[str, Any]


class TrainState(Protocol):
    """Objects of one rank that a training step changes and a checkpoint keeps.

    `trainer.train.step.TrainStep` has them.
    """

    model: nn.Module
    optimizer: Optimizer
    scaler: torch.amp.GradScaler


def optimizer_file(part: int, parts: int) -> str:
    """Returns the name of the file with one part of the optimizer's state."""
    return f"optimizer-{part:05d}-of-{parts:05d}.pt"


def snapshot_weights(model: nn.Module) -> State:
    """Returns a copy of the weights in the host's memory, which training does not touch."""
    return {name: _copied(tensor) for name, tensor in model.state_dict().items()}


def snapshot_optimizer(
    model: nn.Module, optimizer: Optimizer, scaler: Mapping[str, Any], part: int, parts: int
) -> State:
    """Returns a copy of one part of the optimizer's state, by parameter name; every part has the scaler."""
    names = [name for name, parameter in model.named_parameters() if parameter in optimizer.state]
    by_name = dict(model.named_parameters())
    chosen = {name: optimizer.state[by_name[name]] for name in names[part::parts]}
    return {
        "state": {
            name: {key: _copied(value) for key, value in state.items()} for name, state in chosen.items()
        },
        "scaler": dict(scaler),
    }


def load_weights(folder: Path, model: nn.Module) -> None:
    """Loads weights into the model, in place. Raises BrokenCheckpoint if they are another model's."""
    try:
        model.load_state_dict(_load(folder / WEIGHTS))
    except RuntimeError as error:
        raise BrokenCheckpoint(f"{folder}: its weights belong to another model: {error}") from error


def load_optimizer(
    folder: Path, names: list[str], model: nn.Module, optimizer: Optimizer
) -> Mapping[str, Any]:
    """Loads the parts in `names` into the optimizer and returns the scaler's state.

    Any number of ranks may have written them.
    """
    scaler: Mapping[str, Any] = {}
    merged: State = {}
    for name in names:
        part = _load(folder / name)
        merged.update(part["state"])
        scaler = part["scaler"]
    put_optimizer(merged, model, optimizer)
    return scaler


def put_optimizer(by_name: Mapping[str, State], model: nn.Module, optimizer: Optimizer) -> None:
    """Copies state by parameter name into the optimizer, which keeps its own settings."""
    numbers = {
        id(p): number
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    known = {
        numbers[id(p)]: by_name[name]
        for name, p in model.named_parameters()
        if name in by_name and id(p) in numbers
    }
    optimizer.load_state_dict({"state": known, "param_groups": optimizer.state_dict()["param_groups"]})


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True).contiguous() if isinstance(value, Tensor) else value


def _load(path: Path) -> State:
    try:
        state: State = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can make torch.load raise anything
        raise BrokenCheckpoint(f"{path} cannot be loaded: {cause(error)}") from None
    return state
