"""What the trainer asks of a communication backend. Names neither torch.distributed nor Horovod: the two implementations do."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, device, nn

from trainer.health.pulse import Pulse
from trainer.world import World


class Reducer(Protocol):
    """Averages gradients over the ranks, once an optimizer step, overlapping the last backward pass where the backend can."""

    @property
    def module(self) -> nn.Module:
        """What the forward pass calls instead of the model."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Forward and backward passes inside only add to the local gradients."""

    def finish(self) -> None:
        """Collective, after the last backward pass: every `grad` holds the mean over the ranks when it returns."""


class Comm(Protocol):
    """The ranks of one run. Methods are collective unless said otherwise: every rank calls them, in the same order."""

    world: World
    device: device
    name: str
    """Backend as people say it: "torch (nccl)", "torch (gloo)", "horovod"."""
    pulse: Pulse
    """Where this rank says what it is doing."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[n, ...] -> [world_size * n, ...], rank after rank. The same shape on every rank; no gradient: see `autograd.py`."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, as a new tensor. No gradient."""

    def exchange(self, tensor: Tensor, partner: int) -> Tensor:
        """The partner's tensor of the same shape, whose partner is this rank; a rank that is its own partner gets a copy of its own."""

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Sends a small CPU tensor off; the call that it returns waits for the sum. One may be under way at a time."""

    def broadcast_(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrite the tensor, on any device, with the one of rank `root`."""

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """A small picklable value of rank `root`."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """A small picklable value of each rank, in rank order."""

    def barrier(self, timeout_s: float) -> None:
        """Returns when all ranks are here; raises TimeoutError after `timeout_s` seconds."""

    def reducer(self, model: nn.Module) -> Reducer:
        """Wrap the model for gradient averaging; its parameters are equal on all ranks already."""

    def pop_seconds(self) -> float:
        """Not collective. Seconds spent waiting for other ranks or the wire since the last call."""

    def pop_bytes(self) -> int:
        """Not collective. What this rank gave to collectives since the last call, in bytes; what the library makes of it is its affair."""

    def start_timeline(self, path: Path) -> None:
        """Not collective, but for all ranks: the library's own record of its work, as a Chrome trace, if it keeps one (Horovod does)."""

    def stop_timeline(self) -> None:
        """The end of that record."""

    def versions(self) -> Mapping[str, str]:
        """Not collective. What carries the data, for the log and environment.json."""

    def close(self) -> None:
        """Leave the group."""
