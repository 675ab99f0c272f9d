"""Memory in which a loader process hands batches to its rank, used again for later batches.

Fresh shared memory is slow: the kernel finds and clears every page when it is first written, and both sides
open and map the file for each batch. So a loader process keeps its buffers, and its rank keeps them mapped. A
buffer is used again when the rank has let go of the last tensor that lies in it. A byte behind the batch says
so: the loader process sets it, the rank clears it.
"""

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_BUFFERS = 32
"""Largest number of buffers of one loader process; a batch beyond them gets memory of its own."""

Memory = NDArray[np.uint8]


class Lent(NamedTuple):
    """Message from a loader process: the buffer in which the rank finds a batch."""

    loader: int
    worker: int
    number: int
    """Number of the buffer among those of this loader process."""
    memory: Tensor | None
    """The buffer itself, uint8 [bytes + 1], the first time that it is lent; then the rank has it."""
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Order in which the dimensions are permuted, as `Tensor.permute` takes it."""


class _Buffer:
    def __init__(self, size: int) -> None:
        self.memory: Tensor = torch.empty(size + 1, dtype=torch.uint8).share_memory_()
        self.bytes: Memory = self.memory.numpy()
        self.bytes[-1] = 0
        self.held_here = self.sent = False

    def is_free(self) -> bool:
        return not self.held_here and not self.bytes[-1]

    def released_here(self) -> None:
        self.held_here = False


class BufferPool:
    """Buffers of one loader process."""

    def __init__(self, loader: int, worker: int) -> None:
        self._loader, self._worker = loader, worker
        self._buffers: list[_Buffer] = []

    def empty(self, shape: tuple[int, ...], room: int = 0) -> Tensor:
        """Returns uint8 of this shape, not yet filled, in memory of `room` bytes or more that can be lent."""
        size = max(math.prod(shape), room)
        buffer = next((one for one in self._buffers if len(one.bytes) == size + 1 and one.is_free()), None)
        if buffer is None:
            buffer = _Buffer(size)
            if len(self._buffers) >= MOST_BUFFERS:
                return buffer.memory[: math.prod(shape)].view(shape)
            self._buffers.append(buffer)
        buffer.held_here = True
        return _tensor(buffer.bytes, shape, buffer.released_here)

    def lend(self, tensor: Tensor, order: tuple[int, ...]) -> Lent | None:
        """Returns the message for a tensor of `empty`, permuted by `order`; None for any other tensor.

        From now on the buffer is the rank's, until it clears the byte. Another thread may call this.
        """
        for number, buffer in enumerate(self._buffers):
            if buffer.memory.data_ptr() == tensor.data_ptr() and buffer.held_here:
                buffer.bytes[-1] = 1
                memory = None if buffer.sent else buffer.memory
                buffer.sent = True
                back = sorted(range(len(order)), key=order.__getitem__)
                shape = tuple(tensor.permute(back).shape)
                return Lent(self._loader, self._worker, number, memory, shape, order)
        return None


class Borrowed:
    """Buffers that loader processes have lent to this process, by loader."""

    def __init__(self) -> None:
        self._memory: dict[int, dict[tuple[int, int], Tensor]] = {}

    def tensor(self, lent: Lent) -> Tensor:
        """Returns the batch's tensor.

        Its loader process may use the memory again once no tensor lies in it.
        """
        memory = self._memory.setdefault(lent.loader, {})
        at = (lent.worker, lent.number)
        if lent.memory is not None:
            memory[at] = lent.memory
        mapped = memory[at].numpy()
        return _tensor(mapped, lent.shape, partial(_give_back, mapped)).permute(lent.order)

    def forget(self, loader: int) -> None:
        """Unmaps the buffers of a loader that has ended, as soon as no tensor lies in them."""
        self._memory.pop(loader, None)


def _tensor(memory: Memory, shape: tuple[int, ...], released: Callable[[], None]) -> Tensor:
    """Returns the first bytes as a tensor; `released` is called when no tensor of that memory is left."""
    # torch keeps this very array as long as any tensor shares its memory; the caller's array it may outlive.
    array = memory[: math.prod(shape)].reshape(shape)
    weakref.finalize(array, released).atexit = False
    return torch.from_numpy(array)


def _give_back(memory: Memory) -> None:
    memory[-1] = 0
