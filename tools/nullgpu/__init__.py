"""Counts of a null GPU, in a process that `tools/nullgpu/run` started.

    with nullgpu.watch() as seen:
        step()
    assert seen["launches"] < 2000
    assert seen.waits == [], seen.table()

A null GPU stands in for the CUDA driver, the runtime, cuBLAS, cuDNN and NCCL: each call succeeds at once,
computes nothing, and is counted. All of torch above it is real. The host reads zeros from the device, and
true for a bool; small values that it sent come back as they were until the next launch of a kernel.

LD_PRELOAD puts the library before those of torch's wheels; what it lacks is theirs, and fails for want of a
driver. Device memory is addresses without access. Libraries' workspaces and the CUDA context are not counted.
"""

import atexit
import ctypes
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.text.wording import many

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "all_to_all",
    "send",
    "recv",
)
_DEPTH = 24
"""Frames of Python's stack that an event keeps."""


def active() -> bool:
    """Says whether this process runs on null GPUs."""
    return "NULLGPU_LIBRARY" in os.environ


def reads(as_float: float) -> None:
    """Sets what the host reads from the device where it reads a float32 or a bfloat16."""
    _library().nullgpu_reads(as_float)


def peak_gib() -> float:
    """The most that torch's allocator gave out at once since `torch.cuda.reset_peak_memory_stats`."""
    return torch.cuda.max_memory_allocated() / 2**30


@dataclass(frozen=True)
class Event:
    """A call in which the host waits for the GPU, a pageable copy, or a collective."""

    what: str
    bytes: int
    """A collective's are those of the whole tensor, whichever side has it."""
    stack: tuple[tuple[str, int, str], ...]
    """File, line and function of each Python frame, the innermost first; none in a thread of C++."""

    @property
    def place(self) -> str:
        """The innermost line that is not torch's."""
        frames = [frame for frame in self.stack if f"{os.sep}torch{os.sep}" not in frame[0]] or self.stack
        return f"{_shortened(frames[0][0])}:{frames[0][1]}" if frames else "a thread of C++ (autograd?)"


@dataclass
class Seen:
    """Counts and events of a `watch`; the counts are there after it."""

    counts: dict[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def __getitem__(self, counter: str) -> int:
        return self.counts[counter]

    @property
    def waits(self) -> list[Event]:
        """Events in which the host waited: synchronizations and pageable copies."""
        return [event for event in self.events if event.what not in COLLECTIVES]

    @property
    def collectives(self) -> list[Event]:
        return [event for event in self.events if event.what in COLLECTIVES]

    def table(self) -> str:
        """A line for each place and kind of event, the most frequent first: times and bytes."""
        times = Counter((event.what, event.place) for event in self.events)
        size: Counter[tuple[str, str]] = Counter()
        for event in self.events:
            size[event.what, event.place] += event.bytes
        return "\n".join(
            f"{n:6}  {what}, {many(size[what, place], 'byte')}  {place}"
            for (what, place), n in times.most_common()
        )


@contextmanager
def watch() -> Iterator[Seen]:
    """Counts what the block asks of the GPU; waits, pageable copies and collectives have their stacks."""
    seen, before = Seen(), _counts()

    def listener(what: str, size: int) -> None:
        seen.events.append(Event(what, size, _stack()))

    _listen(listener)
    try:
        yield seen
    finally:
        _unlisten(listener)
        seen.counts = {name: value - before[name] for name, value in _counts().items()}


class BytesMoved(TorchDispatchMode):
    """Adds up what the operators inside of a `with` read and write on the device, backward passes too.

    Each operator's inputs and outputs count once, except of views and allocations. Caches are not modelled,
    nor what a kernel reads twice, nor what a compiled region spares. Not to be used inside of `watch`, whose
    events would have the frames of this class.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_op: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        return self.by_op.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read, written = _on_device((args, kwargs)), _on_device(out)
        mutates, name = func._schema.is_mutable, func.overloadpacket.__name__
        if mutates and not written:  # operators on lists return nothing: what they change is among the inputs
            written = read
        if "empty" not in name and (mutates or not _storages(read) & _storages(written)):
            self.by_op[name] += sum(map(_size, read)) + sum(map(_size, written))
        return out


def _on_device(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_cuda]


def _size(tensor: torch.Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())  # an expanded tensor is read once


def _storages(tensors: list[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["NULLGPU_LIBRARY"])
    library.nullgpu_counter.restype = ctypes.c_char_p
    library.nullgpu_reads.argtypes = (ctypes.c_float,)
    library.nullgpu_hook.argtypes = (ctypes.c_void_p,)
    return library


def _counts() -> dict[str, int]:
    """Every counter of src/nullgpu.h."""
    library, value, found = _library(), ctypes.c_uint64(), dict[str, int]()
    while name := library.nullgpu_counter(len(found), ctypes.byref(value)):
        found[name.decode()] = value.value
    return found


_Listener = Callable[[str, int], None]
_listeners: list[_Listener] = []


def _told(what: bytes, size: int) -> None:
    for listener in _listeners:
        listener(what.decode(), size)


_hook = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_size_t)(_told)
"""C knows its address alone: the name keeps it alive."""


def _listen(listener: _Listener) -> None:
    _listeners.append(listener)
    _library().nullgpu_hook(ctypes.cast(_hook, ctypes.c_void_p))
    atexit.register(_unlisten, listener)  # torch waits for the device once more when the interpreter is gone


def _unlisten(listener: _Listener) -> None:
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners:
        _library().nullgpu_hook(None)


def _stack() -> tuple[tuple[str, int, str], ...]:
    frame, frames = sys._getframe(), list[tuple[str, int, str]]()
    while frame is not None and len(frames) < _DEPTH:
        if frame.f_code.co_filename != __file__:
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(frames)


def _shortened(path: str) -> str:
    """From the working folder, or from the folder of packages that it lies in."""
    folders = [folder for folder in (os.getcwd(), *sys.path) if folder and path.startswith(folder + os.sep)]
    return os.path.relpath(path, max(folders, key=len)) if folders else path
