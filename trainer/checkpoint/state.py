"""Contents of a checkpoint: weights, optimizer and scaler, as tensors and plain values.

Loading them never runs code. There is no random state to keep: augmentation, captions and dropout are
functions of seed, epoch and position, the learning rate is a function of the step, and the step gives the
data position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.files import WEIGHTS, BrokenCheckpoint
from trainer.checkpoint.weights import cause
from trainer.comm.host_memory import HostCopy

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


class Snapshot:
    """Copies of the tensors of several files in the host's memory, which training does not touch.

    The copies of a GPU's tensors are all under way at once, and the host goes on.
    """

    def __init__(self, contents: Mapping[str, State]) -> None:
        """`contents` has the state of each file by its name, in nested dictionaries."""
        self._tensors: list[Tensor] = []
        self._contents = _with_places(contents, self._tensors)
        self.nbytes = sum(tensor.nbytes for tensor in self._tensors)
        self._copy = HostCopy(self._tensors)
        self._tensors.clear()

    def get(self) -> dict[str, State]:
        """Returns the contents with the copies; waits until they have arrived."""
        filled: dict[str, State] = _filled(self._contents, self._copy.get())
        return filled


def optimizer_part(
    model: nn.Module, optimizer: Optimizer, scaler: Mapping[str, Any], part: int, parts: int
) -> State:
    """Returns one part of the optimizer's state itself, by parameter name; every part has the scaler."""
    names = [name for name, parameter in model.named_parameters() if parameter in optimizer.state]
    by_name = dict(model.named_parameters())
    chosen = {name: optimizer.state[by_name[name]] for name in names[part::parts]}
    return {"state": {name: dict(state) for name, state in chosen.items()}, "scaler": dict(scaler)}


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


@dataclass(frozen=True)
class _Place:
    number: int


def _with_places(value: Any, tensors: list[Tensor]) -> Any:
    """Returns the value with each tensor replaced by its place in `tensors`, to which it is appended."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Place(len(tensors) - 1)
    if isinstance(value, Mapping):
        return {key: _with_places(item, tensors) for key, item in value.items()}
    return value


def _filled(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.number]
    return {key: _filled(item, tensors) for key, item in value.items()} if isinstance(value, dict) else value


def _load(path: Path) -> State:
    try:
        state: State = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can make torch.load raise anything
        raise BrokenCheckpoint(f"{path} cannot be loaded: {cause(error)}") from None
    return state
