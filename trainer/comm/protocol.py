"""Protocol that every communication backend implements.

It names neither torch.distributed nor Horovod; only the implementations do.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, device, nn

from trainer.comm.shards import Shards
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World


class Reducer(Protocol):
    """Averages gradients over the ranks once per optimizer step.

    The backend does so during the last backward pass if it can.
    """

    @property
    def module(self) -> nn.Module:
        """Module that the forward pass calls instead of the model."""

    @property
    def shards(self) -> Shards:
        """Parameters as this rank holds them."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Returns a context in which forward and backward passes only add to the local gradients."""

    def finish(self) -> None:
        """Collective, after the last backward pass: on return, every `grad` holds the mean over the ranks.

        It is the `grad` of `shards.parameters`, and only these ask for the rows that this rank holds.
        """


class Comm(Protocol):
    """Communication between the ranks of one run.

    Methods are collective unless they say otherwise: every rank calls them, in the same order.
    """

    world: World
    device: device
    name: str
    """Name of the backend for people: "torch (nccl)", "fsdp (gloo)" or "horovod"."""
    heartbeat: Heartbeat
    """Record in which this rank writes its current phase, for the supervisor to read."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gathers a tensor, rank after rank: [n, ...] -> [world_size * n, ...].

        The shape is the same on every rank. No gradient passes; see `autograd.py`.
        """

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts what `all_gather` does; the returned function, called once, waits and gives the result.

        Computation and other collectives may come in between, on all ranks in the same order. One such gather
        may be under way at a time.
        """

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum over the ranks as a new tensor. No gradient passes."""

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Returns this rank's rows of the sum over the ranks: [world_size * n, ...] -> [n, ...].

        Rank after rank, as `all_gather` lays them. No gradient passes.
        """

    def exchange(self, tensor: Tensor, partner: int) -> Tensor:
        """Swaps tensors of the same shape with the partner; returns the partner's.

        The partner names this rank as its partner. A rank that is its own partner gets a copy of its own
        tensor.
        """

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Starts to sum a small CPU tensor; the returned function waits for the sum.

        One sum may be under way at a time.
        """

    def broadcast_(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrites the tensor, on any device, with that of rank `root`."""

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Returns rank `root`'s value.

        It may hold numbers, texts, lists, tuples and mappings; see `trainer.comm.objects`.
        """

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the values of all ranks in rank order, each of the types that `broadcast_object` takes."""

    def barrier(self, timeout_s: float) -> None:
        """Returns when all ranks have called it; raises TimeoutError after `timeout_s` seconds."""

    def reducer(self, model: nn.Module) -> Reducer:
        """Wraps the model for gradient averaging; its parameters must be equal on all ranks already.

        The backend may split them over the ranks in place, see `Reducer.shards`. A single rank gets
        `LocalReducer`, which does nothing.
        """

    def pop_seconds(self) -> float:
        """Returns the seconds spent waiting for other ranks or for data transfer since the last call.

        Not collective. What a GPU is still working on is left to a later call.
        """

    def pop_bytes(self) -> int:
        """Returns the bytes that this rank gave to collectives since the last call. Not collective.

        The library may send more or fewer.
        """

    def start_timeline(self, path: Path) -> None:
        """Starts the library's own record of its work, a Chrome trace, if it keeps one (Horovod does).

        Not collective, but every rank calls it.
        """

    def stop_timeline(self) -> None:
        """Ends the record that `start_timeline` began."""

    def versions(self) -> Mapping[str, str]:
        """Returns versions of the libraries that carry the data, for the log and environment.json.

        Not collective.
        """

    def close(self) -> None:
        """Leaves the process group."""
