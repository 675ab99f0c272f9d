"""Gives ranks that split the model their rows of a checkpoint, which rank 0 has read.

Tensor by tensor goes to all ranks, and each keeps its own rows: no rank's device has the whole model.
"""

from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.state import State, TrainState, WholeState, put_optimizer
from trainer.comm.protocol import Comm

_WEIGHTS = ""
"""Key of a weight in the list of tensors; the optimizer's tensors have theirs."""


def scatter(comm: Comm, train: TrainState, whole: WholeState | None, root: int = 0) -> None:
    """Collective: copies the contents that rank `root` has into model and optimizer of every rank.

    The other ranks give None.
    """
    tensors: dict[tuple[str, str], Any] = {}
    if whole is not None:
        tensors = {(name, _WEIGHTS): tensor for name, tensor in whole.weights.items()}
        for name, state in whole.optimizer.items():
            tensors |= {(name, key): value for key, value in state.items()}
    items = comm.broadcast_object([(*place, _described(value)) for place, value in tensors.items()], root)
    weights = train.shards.state()
    optimizer: dict[str, State] = {}
    for name, key, about in items:
        value = _sent(comm, about, tensors.get((name, key)), root)
        if isinstance(value, Tensor) and value.ndim:
            value = train.shards.own(name, value)
        if key == _WEIGHTS:
            with torch.no_grad():
                weights[name].copy_(value)
        else:
            # A copy: a view would keep the whole tensor.
            optimizer.setdefault(name, {})[key] = value.clone() if isinstance(value, Tensor) else value
    put_optimizer(optimizer, train.shards.parameters, train.optimizer)


def _described(value: Any) -> Any:
    """Returns shape and dtype of a tensor, or the value itself if it is none."""
    if not isinstance(value, Tensor):
        return {"value": value}
    return {"shape": tuple(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}


def _sent(comm: Comm, about: Any, value: Any, root: int) -> Any:
    """Collective: returns rank `root`'s value on this rank's device."""
    if "value" in about:
        return about["value"]
    tensor = (
        value.to(comm.device)
        if comm.world.rank == root
        else torch.empty(about["shape"], dtype=getattr(torch, about["dtype"]), device=comm.device)
    )
    comm.broadcast_(tensor, root)
    return tensor
