"""Copies between the host's memory and a GPU for which nobody waits.

Only page-locked memory lets a GPU copy while the host goes on. From and to ordinary memory every copy makes
the host wait, however it is asked for.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from trainer.comm.accelerator import on_accelerator, pins_memory, runtime

TensorT = TypeVar("TensorT", bound=Tensor)
BLOCK_BYTES = 256 * 2**20
"""Bytes of page-locked memory that hold several tensors. torch gives such memory in powers of two alone."""
_ALIGNMENT = 64
_POLL_S = 20e-6


def bytes_in_order(tensor: Tensor) -> Tensor:
    """Returns the tensor's values in order as bytes, uint8 [bytes]: of a contiguous one its own memory."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a small CPU tensor on the device, without waiting for it."""
    if not pins_memory(device):
        return tensor.to(device)
    pinned = torch.empty_like(tensor, pin_memory=True, memory_format=torch.contiguous_format)
    # torch would wake threads for it, which then spin beside the loader processes.
    bytes_in_order(pinned).numpy()[:] = bytes_in_order(tensor).numpy()
    return pinned.to(device, non_blocking=True)


class HostCopy:
    """Copies of tensors in the host's memory, which arrive while the host goes on.

    Later work on the current stream may change the tensors; work on other streams must not.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """`tensors` may make them in their turn: BLOCK_BYTES of them, or one that is larger, live at once."""
        self._event: torch.Event | None = None
        self._copies: list[Tensor] = []
        for group in groups_of(tensors, BLOCK_BYTES, _room):
            if any(on_accelerator(tensor.device) for tensor in group):
                self._copies += _to_pinned(group)
                self._event = self._event or runtime(group[-1].device).Event()
            else:
                self._copies += [
                    tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in group
                ]
            group.clear()
        if self._event is not None:
            self._event.record()

    def get(self) -> list[Tensor]:
        """Returns the copies, contiguous, each with memory of its own; waits until they have arrived.

        It asks the GPU again and again: in other threads Python goes on meanwhile.
        """
        while self._event is not None and not self._event.query():
            time.sleep(_POLL_S)
        return self._copies


def blocks_of(tensors: Iterable[Tensor]) -> list[int]:
    """Returns the bytes of each page-locked block that a HostCopy of these tensors takes."""
    return [
        sum(map(_room, group))
        for group in groups_of(tensors, BLOCK_BYTES, _room)
        if any(pins_memory(one.device) for one in group)
    ]


def reserve(blocks: Iterable[int]) -> None:
    """Takes page-locked blocks and gives them back to torch, which keeps them for the next HostCopy.

    This lasts a second for some GB. Raises RuntimeError if the machine does not give as much.
    """
    _ = [_block(size, pinned=True) for size in blocks]  # all of them at once


def _to_pinned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Starts the copies, on the current stream.

    Tensors share a page-locked block, but not storages: saved to a file, each is as long as itself.
    """
    copies = []
    block = _block(sum(map(_room, tensors)), pinned=pins_memory(tensors[0].device))
    memory, start = block.numpy(), 0
    for tensor in tensors:
        piece = slice(start, start + tensor.nbytes)
        source = tensor.detach().contiguous()
        _shaped(block[piece], source).copy_(source, non_blocking=True)
        copies.append(_shaped(torch.from_numpy(memory[piece]), source))
        start += _room(tensor)
    return copies


def _block(size: int, *, pinned: bool) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def _shaped(raw: Tensor, like: Tensor) -> Tensor:
    return raw.view(like.dtype).view(like.shape)


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def groups_of(
    tensors: Iterable[TensorT], most_bytes: int, size_of: Callable[[Tensor], int]
) -> Iterator[list[TensorT]]:
    """Yields the tensors in order, in groups of at most so many bytes, or of one that is larger."""
    group: list[TensorT] = []
    size = 0
    for tensor in tensors:
        if group and size + size_of(tensor) > most_bytes:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += size_of(tensor)
    if group:
        yield group
