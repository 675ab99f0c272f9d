"""Contents of a checkpoint: weights, optimizer and scaler, as tensors and plain values.

Loading them never runs code. There is no random state to keep: augmentation, captions and dropout are
functions of seed, epoch and position, the learning rate is a function of the step, and the step gives the
data position.
"""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.files import EMA_WEIGHTS, WEIGHTS, BrokenCheckpoint
from trainer.checkpoint.weights import cause
from trainer.comm import host_memory
from trainer.comm.host_memory import HostCopy
from trainer.comm.shards import Shards

State = dict[str, Any]
EMA = "ema"
"""Key of the moving average among the optimizer's values of a parameter; on disk it has a file of its own."""


class TrainState(Protocol):
    """Objects of one rank that a training step changes and a checkpoint keeps.

    `trainer.train.step.TrainStep` has them.
    """

    model: nn.Module
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    shards: Shards
    """The model's parameters as this rank holds them."""


def shared_files(train: TrainState) -> list[str]:
    """Returns the names of the files that hold all parameters: the weights, and their moving average if any.

    Part 0 writes them.
    """
    has_ema = any(EMA in values for values in train.optimizer.state.values())
    return [WEIGHTS, EMA_WEIGHTS] if has_ema else [WEIGHTS]


def optimizer_file(part: int, parts: int) -> str:
    """Returns the name of the file with one part of the optimizer's state."""
    return f"optimizer-{part:05d}-of-{parts:05d}.pt"


def is_optimizer_file(name: str) -> bool:
    """Returns whether a file of a checkpoint holds a part of the optimizer's state."""
    return name.startswith("optimizer-")


@dataclass(frozen=True)
class Split:
    """Tensor of which this rank has some rows; a file gets it whole."""

    name: str
    """Parameter that it belongs to."""
    rows: Tensor
    shards: Shards

    def whole(self) -> Tensor:
        """Collective: returns all rows."""
        return self.shards.whole(self.name, self.rows)


class Snapshot:
    """Copies of the tensors of several files in the host's memory, which training does not touch.

    The copies of a GPU's tensors are all under way at once, and the host goes on.
    """

    def __init__(self, contents: Mapping[str, State], others: Container[str] = ()) -> None:
        """`contents` has the state of each file by its name, in nested dictionaries.

        Collective if it holds a `Split`: every rank gives all files in the same order. Each tensor is put
        together in its turn, on all ranks, so that none has more than some of them whole. Files in `others`
        are for other ranks: nothing of them is kept here.
        """
        self.nbytes = 0
        leaves: list[tuple[Tensor | Split, bool]] = []
        own: list[Tensor | Split] = []
        self._contents: State = {}
        for file, content in contents.items():
            if file in others:
                unused: list[Tensor | Split] = []
                _with_places(content, unused)
                leaves += [(leaf, False) for leaf in unused]
                continue
            first = len(own)
            self._contents[file] = _with_places(content, own)
            leaves += [(leaf, True) for leaf in own[first:]]
        own.clear()
        self._copy = HostCopy(self._wholes(leaves))

    def get(self) -> dict[str, State]:
        """Returns the contents with the copies; waits until they have arrived."""
        filled: dict[str, State] = _filled(self._contents, self._copy.get())
        return filled

    def _wholes(self, leaves: Sequence[tuple["Tensor | Split", bool]]) -> Iterator[Tensor]:
        for leaf, is_own in leaves:
            tensor = leaf.whole() if isinstance(leaf, Split) else leaf
            if is_own:
                self.nbytes += tensor.nbytes
                yield tensor


def blocks_of(contents: Mapping[str, State]) -> list[int]:
    """Returns the bytes of each page-locked block that a Snapshot takes, if it holds no `Split`."""
    leaves: list[Tensor | Split] = []
    _with_places(dict(contents), leaves)
    return host_memory.blocks_of(leaf for leaf in leaves if isinstance(leaf, Tensor))


@dataclass(frozen=True)
class WholeState:
    """Contents of a checkpoint in the host's memory."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, State]
    """State of the optimizer by parameter."""
    scaler: Mapping[str, Any]


def contents_of(train: TrainState, part: int, parts: int) -> dict[str, State]:
    """Returns the files that part `part` of `parts` writes, with the state itself; part 0 has the weights.

    If the parameters are split over the ranks, every rank gets all files: they are put together by all.
    """
    wanted = range(parts) if train.shards.split else range(part, part + 1)
    files: dict[str, State] = {}
    if 0 in wanted:
        tensors = train.shards.state()
        files = {file: _leaves(tensors, train.shards) for file in shared_files(train)}
        if EMA_WEIGHTS in files:
            averages = {name: values[EMA] for name, values in _values(train).items() if EMA in values}
            files[EMA_WEIGHTS] |= _leaves(averages, train.shards)
    for number in wanted:
        files[optimizer_file(number, parts)] = _optimizer_part(train, number, parts)
    return files


def _optimizer_part(train: TrainState, part: int, parts: int) -> State:
    """Returns one part of the optimizer's state by parameter name; every part has the scaler."""
    states = _values(train)
    return {
        "state": {
            name: {key: _leaf(name, value, train.shards) for key, value in states[name].items() if key != EMA}
            for name in list(states)[part::parts]
        },
        "scaler": dict(train.scaler.state_dict()),
    }


def _values(train: TrainState) -> dict[str, State]:
    """Returns the optimizer's values by the name of their parameter."""
    return {
        name: train.optimizer.state[parameter]
        for name, parameter in train.shards.parameters.items()
        if parameter in train.optimizer.state
    }


def _leaves(tensors: Mapping[str, Any], shards: Shards) -> State:
    return {name: _leaf(name, tensor, shards) for name, tensor in tensors.items()}


def _leaf(name: str, value: Any, shards: Shards) -> Any:
    """Returns the value, or a `Split` for one that is split as its parameter is; counts of steps are not."""
    is_split = name in shards.split and isinstance(value, Tensor) and value.ndim > 0
    return Split(name, value, shards) if is_split else value


def load(folder: Path, names: Collection[str]) -> WholeState:
    """Returns the contents of a checkpoint's files, of which any number of ranks may have written parts.

    Raises BrokenCheckpoint for a file that cannot be loaded.
    """
    scaler: Mapping[str, Any] = {}
    merged: State = {}
    for name in filter(is_optimizer_file, names):
        part = _load(folder / name)
        merged.update(part["state"])
        scaler = part["scaler"]
    if EMA_WEIGHTS in names:
        averages = _load(folder / EMA_WEIGHTS)
        for name, values in merged.items():
            values[EMA] = averages[name]
    return WholeState(_load(folder / WEIGHTS), merged, scaler)


def put_weights(weights: Mapping[str, Tensor], train: TrainState) -> None:
    """Copies weights into the model, in place, if this rank has all of it.

    A model that is split gets its rows from `resume.scatter`. Raises RuntimeError if they are
    another model's.
    """
    if train.shards.split:
        _compare(weights, train.model.state_dict())
    else:
        train.model.load_state_dict(weights)


def _compare(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError with the first names that only one of both has, or whose shapes differ."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    different = sorted(
        name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name)
    )
    if different:
        raise RuntimeError(
            "; ".join(
                f"{name} is {shapes.get(name, 'missing')}, the model's {expected.get(name, 'missing')}"
                for name in different[:5]
            )
        )


def put_optimizer(
    by_name: Mapping[str, State], parameters: Mapping[str, nn.Parameter], optimizer: Optimizer
) -> None:
    """Copies state by parameter name into the optimizer, which keeps its own settings."""
    numbers = {
        id(p): number
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    known = {
        numbers[id(p)]: by_name[name]
        for name, p in parameters.items()
        if name in by_name and id(p) in numbers
    }
    optimizer.load_state_dict({"state": known, "param_groups": optimizer.state_dict()["param_groups"]})


@dataclass(frozen=True)
class _Place:
    number: int


def _with_places(value: Any, tensors: list[Tensor | Split]) -> Any:
    """Returns the value with each tensor replaced by its place in `tensors`, to which it is appended."""
    if isinstance(value, Tensor | Split):
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
