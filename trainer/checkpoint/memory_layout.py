"""Places of all tensors of a run's state in one row of bytes, equal on every rank and for any number of them.

The row is cut into blocks of the same size. A checksum is a row of sums, one for each block, so it does not
depend on how many ranks wrote the bytes. Tensors are written in the order of their memory, whatever it is
(channels_last too), and their strides belong to the layout.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.checkpoint.state import State, TrainState
from trainer.internals import SCALER_TENSORS, scaler_tensor
from trainer.safe_io.atomic import json_text

BLOCK = 1 << 16
"""Bytes of a block."""
_ALIGNED = 64
WEIGHTS, OPTIMIZER, SCALER = "weights", "optimizer", "scaler"


class NotKept(Exception):
    """Raised for a state that cannot be kept in memory; the text says why."""


class NamedTensor(NamedTuple):
    """A tensor of the state; `key` names the optimizer's value of a parameter and is "" for weights."""

    kind: str
    name: str
    key: str
    tensor: Tensor


@dataclass(frozen=True)
class Entry:
    """Place of one tensor in the row of bytes."""

    kind: str
    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """First byte, a multiple of 64."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def type(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def bytes(self) -> int:
        return self.numel * self.type.itemsize


class Piece(NamedTuple):
    """Part of a tensor within a range: bytes `begin` to `end` of the entry, at `offset` of the row."""

    entry: int
    begin: int
    end: int
    offset: int


@dataclass(frozen=True)
class Layout:
    """Places of all tensors; `size` is the number of bytes, a multiple of BLOCK."""

    entries: tuple[Entry, ...]
    size: int
    run: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the run whose state it is, as `trainer.checkpoint.identity` has them."""

    @classmethod
    def of(cls, tensors: Sequence[NamedTensor], run: Mapping[str, Any] | None = None) -> "Layout":
        """Lays out the tensors in their order. Raises NotKept for one whose elements leave gaps in memory."""
        entries, offset = [], 0
        for kind, name, key, tensor in tensors:
            _check_dense(name, tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            entry = Entry(kind, name, key, dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)
            entries.append(entry)
            offset += -(-entry.bytes // _ALIGNED) * _ALIGNED
        return cls(tuple(entries), -(-offset // BLOCK) * BLOCK, json.loads(json_text(run or {})))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Layout":
        """Returns the layout that `to_json` described."""
        entries = (
            Entry(**{**entry, "shape": tuple(entry["shape"]), "stride": tuple(entry["stride"])})
            for entry in value["entries"]
        )
        return cls(tuple(entries), value["size"], value["run"])

    def to_json(self) -> dict[str, Any]:
        """Returns the layout as its file has it."""
        return {
            "size": self.size,
            "run": dict(self.run),
            "entries": [dict(vars(each)) for each in self.entries],
        }

    @cached_property
    def digest(self) -> str:
        """Name of the layout, 16 hex digits."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def range_of(self, part: int, parts: int) -> tuple[int, int]:
        """Returns the first byte of a part, and the byte after its last; parts are whole blocks."""
        blocks = self.size // BLOCK
        return BLOCK * (blocks * part // parts), BLOCK * (blocks * (part + 1) // parts)

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """Yields the parts of tensors that lie in a range of bytes."""
        for number, entry in enumerate(self.entries):
            first, last = max(begin, entry.offset), min(end, entry.offset + entry.bytes)
            if first < last:
                yield Piece(number, first - entry.offset, last - entry.offset, first)


def named_tensors(train: TrainState) -> list[NamedTensor]:
    """Returns all tensors of the state: weights and buffers, the optimizer's by parameter, the scaler's.

    The scaler's are those from which its `state_dict` would make numbers, and wait for a GPU. All share their
    memory with the state. Raises NotKept if the optimizer has a value that is no tensor.
    """
    found = [NamedTensor(WEIGHTS, name, "", tensor) for name, tensor in train.model.state_dict().items()]
    for name, parameter in train.model.named_parameters():
        for key, value in train.optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                raise NotKept(f"the optimizer's {key} of {name} is a {type(value).__name__} and no tensor")
            found.append(NamedTensor(OPTIMIZER, name, key, value))
    if train.scaler.is_enabled():
        found += [
            NamedTensor(SCALER, name, "", value)
            for name in SCALER_TENSORS
            if (value := scaler_tensor(train.scaler, name)) is not None
        ]
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the tensor's memory as a row of bytes, uint8 [bytes], which shares it."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def tensors_of(layout: Layout, row: Tensor) -> tuple[State, dict[str, State], State]:
    """Returns weights, optimizer state by parameter and numbers of the scaler's state, from a row of bytes.

    All tensors are views of the row.
    """
    weights: State = {}
    optimizer: dict[str, State] = {}
    scaler: State = {}
    for entry in layout.entries:
        flat = row[entry.offset : entry.offset + entry.bytes].view(entry.type)
        tensor = flat.as_strided(entry.shape, entry.stride)
        if entry.kind == WEIGHTS:
            weights[entry.name] = tensor
        elif entry.kind == SCALER:
            scaler[SCALER_TENSORS[entry.name]] = tensor.item()
        else:
            optimizer.setdefault(entry.name, {})[entry.key] = tensor
    return weights, optimizer, scaler


def block_sums(row: Tensor) -> Tensor:
    """Returns the sum of each block of a row of bytes as 64-bit words modulo 2**64, int64 [blocks]."""
    return row.view(torch.int64).view(-1, BLOCK // 8).sum(1)


def _check_dense(name: str, tensor: Tensor) -> None:
    """Raises NotKept unless the tensor's elements fill a range of memory, each place once."""
    if tensor.layout != torch.strided:
        raise NotKept(f"{name} is a sparse tensor")
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            raise NotKept(f"the elements of {name} do not fill a range of memory")
        expected *= size
