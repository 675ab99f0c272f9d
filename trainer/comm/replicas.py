"""Makes parameters and optimizer state equal on every rank, and checks that they are."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.comm.host_memory import bytes_in_order, groups_of
from trainer.comm.protocol import Comm
from trainer.comm.shards import Shards


def broadcast_replicas(comm: Comm, model: nn.Module, optimizer: Optimizer, root: int = 0) -> None:
    """Copies parameters, buffers and the optimizer's state (tensors and numbers) of rank `root` to all.

    The settings of its groups stay each rank's own: the job gives the same to all, and some are no numbers,
    such as the type of Adafactor's momentum. Collective.
    """
    _broadcast_all(comm, list(model.state_dict().values()), root)
    packed, tensors = _pack(optimizer.state_dict()["state"])
    shapes = [(tuple(t.shape), str(t.dtype).removeprefix("torch."), t.device.type) for t in tensors]
    packed, shapes = comm.broadcast_object((packed, shapes), root)
    if comm.world.rank != root:
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype), device=comm.device if kind != "cpu" else "cpu")
            for shape, dtype, kind in shapes
        ]
    _broadcast_all(comm, tensors, root)
    if comm.world.rank != root:
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": _unpack(packed, tensors), "param_groups": groups})


def _broadcast_all(comm: Comm, tensors: Sequence[Tensor], root: int) -> None:
    """Copies the tensors of rank `root` to all, small ones together: each broadcast waits for all ranks.

    Collective.
    """
    for group in _together(tensors):
        if len(group) == 1:
            comm.broadcast_(group[0], root)
            continue
        row = torch.cat([tensor.detach().reshape(-1).to(comm.device) for tensor in group])
        comm.broadcast_(row, root)
        if comm.world.rank != root:
            for tensor, part in zip(group, row.split([tensor.numel() for tensor in group]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))


def _together(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields groups of tensors of one dtype, of at most _TOGETHER bytes or one tensor that is larger."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        yield from groups_of(
            (each for each in tensors if each.dtype == dtype), _TOGETHER, attrgetter("nbytes")
        )


class ReplicaError(RuntimeError):
    """Raised when ranks hold different values; the text names ranks and tensors."""


def check_replicas(comm: Comm, shards: Shards, optimizer: Optimizer) -> None:
    """Compares every rank's parameters and optimizer state with rank 0's. Collective.

    Parameters that are split are compared among the ranks that hold the same rows. Each rank sends two
    digests; only if some differ do names and checksums travel, which are hundreds of megabytes for
    10,000 ranks. Raises ReplicaError on every rank if any rank's differ.
    """
    names, sums, split = [], [], []
    for name, of, tensor in _named_tensors(shards, optimizer):
        names.append(name)
        sums.append(_checksum(tensor))
        split.append(of in shards.split)
    if _digests_agree(comm.all_gather_object((*_digests(names, sums, split), shards.part))):
        return
    everyone = comm.all_gather_object((names, sums, shards.part))
    same_part: dict[str, tuple[list[str], list[Any]]] = {}
    wrong = {}
    for rank, (their_names, their_sums, part) in enumerate(everyone):
        first = same_part.setdefault(part, (their_names, their_sums))
        expected = [
            own if is_split else shared
            for own, shared, is_split in zip(first[1], everyone[0][1], split, strict=True)
        ]
        wrong[rank] = _differing((everyone[0][0], expected), (their_names, their_sums))
    lines = [
        f"rank {rank}: {', '.join(bad[:5])}{' ...' if len(bad) > 5 else ''}"
        for rank, bad in wrong.items()
        if bad
    ]
    if lines:
        raise ReplicaError("parameters or optimizer state differ from rank 0's on\n" + "\n".join(lines))


def _digests(names: Sequence[str], sums: Sequence[Any], split: Sequence[bool]) -> tuple[str, str]:
    """Returns a digest of what is the same on all ranks, names included, and one of the rows of this rank."""
    rows = list(zip(names, sums, split, strict=True))
    shared = [(name, None if is_split else its) for name, its, is_split in rows]
    own = [its for _, its, is_split in rows if is_split]
    digests = [hashlib.sha256(json.dumps(part).encode()).hexdigest() for part in (shared, own)]
    return digests[0], digests[1]


def _digests_agree(everyone: Sequence[tuple[str, str, str]]) -> bool:
    """Returns whether all ranks share one digest, and those of one part the other."""
    of_parts = {(part, own) for _, own, part in everyone}
    return len({shared for shared, _, _ in everyone}) == 1 and len(of_parts) == len(
        {part for part, _ in of_parts}
    )


def _differing(first: tuple[list[str], list[Any]], other: tuple[list[str], list[Any]]) -> list[str]:
    if first[0] != other[0]:
        return sorted(set(first[0]) ^ set(other[0])) or ["order of tensors"]
    return [name for name, a, b in zip(first[0], first[1], other[1], strict=True) if a != b]


def _named_tensors(shards: Shards, optimizer: Optimizer) -> Iterator[tuple[str, str, Tensor]]:
    """Yields each tensor with its name and that of its parameter."""
    for name, tensor in shards.state().items():
        yield name, name, tensor
    names = {id(p): name for name, p in shards.parameters.items()}
    for parameter, state in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield f"{name} ({key})", name, value


def _checksum(tensor: Tensor) -> tuple[int, int]:
    """Returns two sums of the tensor's words of 8 bytes modulo 2**64, plain and weighted by position.

    They differ if one bit does.
    """
    words = _words(tensor)
    plain = weighted = 0
    for start in range(0, words.numel(), _CHUNK):
        piece = words[start : start + _CHUNK]
        plain += int(piece.sum())
        weighted += int(
            (piece * torch.arange(start + 1, start + 1 + piece.numel(), device=piece.device)).sum()
        )
    return plain % 2**64, weighted % 2**64


def _words(tensor: Tensor) -> Tensor:
    """Returns the tensor's bytes as int64, of which the last is filled up with zeros."""
    raw = bytes_in_order(tensor)
    missing = -raw.numel() % 8
    if missing or raw.storage_offset() % 8:
        raw = torch.cat([raw, raw.new_zeros(missing)])
    return raw.view(torch.int64)


_TOGETHER = 1 << 24
"""Bytes of tensors that are sent in one broadcast: 16 MiB."""
_CHUNK = 1 << 22  # words that are summed at a time: their positions take 32 MiB


def _pack(state: Any) -> tuple[Any, list[Tensor]]:
    """Returns the state with each tensor replaced by its number, and the list of tensors."""
    tensors: list[Tensor] = []

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return {_SLOT: len(tensors) - 1}
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, (list, tuple)) else value

    return walk(state), tensors


def _unpack(packed: Any, tensors: list[Tensor]) -> Any:
    if isinstance(packed, dict) and _SLOT in packed:
        return tensors[packed[_SLOT]]
    if isinstance(packed, dict):
        return {key: _unpack(item, tensors) for key, item in packed.items()}
    return [_unpack(item, tensors) for item in packed] if isinstance(packed, list) else packed


_SLOT = "clipship.tensor"
"""Key of the mapping that replaces a tensor in a packed state; its value is the tensor's number."""
