"""Ranks that are threads of one process, for tests of what ranks compute together.

Their collectives pass tensors through memory. A rank that fails ends the others' waiting.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainer.comm.reducers import DeterministicReducer
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World

Result = TypeVar("Result")


class _Table:
    """Table on which each rank lays its value, and from which each takes all of them."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadComm:
    """Implements the part of `protocol.Comm` that steps and the opening of data use."""

    def __init__(self, rank: int, size: int, table: _Table) -> None:
        self.world = World(rank, size, rank, size, "here", "test")
        self.device, self.name = torch.device("cpu"), "threads"
        self.heartbeat = Heartbeat.open({})
        self.sent: list[tuple[str, tuple[int, ...]]] = []
        """Name of each collective that carried a tensor, and the shape of this rank's."""
        self._table = table

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._everybodys("all_gather", tensor.detach()))

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        gathered = torch.cat(self._everybodys("start all_gather", tensor.detach()))
        return lambda: gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._everybodys("all_reduce", tensor.detach())).sum(0)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        total = torch.stack(self._everybodys("reduce_scatter", tensor.detach())).sum(0)
        return total.chunk(self.world.size)[self.world.rank].clone()

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._exchanged(value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self._exchanged(value)[root]

    def barrier(self, timeout_s: float) -> None:
        self._table.barrier.wait(timeout_s)

    def reducer(self, model: nn.Module) -> Any:
        return DeterministicReducer(model, self.all_reduce, self.world.size)

    def _everybodys(self, name: str, tensor: Tensor) -> list[Any]:
        self.sent.append((name, tuple(tensor.shape)))
        return self._exchanged(tensor.clone())

    def _exchanged(self, value: Any) -> list[Any]:
        self._table.values[self.world.rank] = value
        self._table.barrier.wait()
        values = list(self._table.values)
        self._table.barrier.wait()
        return values


def one_rank() -> ThreadComm:
    """Returns what the only rank of a world has, in this thread."""
    return ThreadComm(0, 1, _Table(1))


def run_ranks(size: int, rank_main: Callable[[Any], Result]) -> list[Result]:
    """Calls `rank_main` with a `ThreadComm` for each rank; returns the results in rank order."""
    table = _Table(size)

    def run(rank: int) -> Result:
        try:
            return rank_main(ThreadComm(rank, size, table))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        runs = [pool.submit(run, rank) for rank in range(size)]
        errors = [error for done in runs if (error := done.exception()) is not None]
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
        if errors:
            raise errors[0]
        return [done.result() for done in runs]
