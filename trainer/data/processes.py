"""Loader processes: a torch DataLoader whose processes are forked by a server of ours.

Its errors come without a worker's traceback.
"""

import faulthandler
import logging
import math
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainer.comm.accelerator import in_use
from trainer.errors import InputError, MachineError
from trainer.internals import look_every, name_resources, process_server, spawn, spawning_by
from trainer.run.exit_record import RANK_DIR
from trainer.sysinfo.forks import fork, threads_lost
from trainer.sysinfo.parent import end_with_parent
from trainer.sysinfo.shortage import PREFETCHED
from trainer.text.wording import many

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
    """Buffers of one loader process.

    Fresh shared memory is slow: the kernel finds and clears every page when it is first written, and both
    sides open and map the file for each batch. So a loader process keeps its buffers, and its rank keeps them
    mapped. A buffer is used again when the rank has let go of the last tensor that lies in it. A byte behind
    the batch says so: the loader process sets it, the rank clears it.
    """

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


log = logging.getLogger("clipship")

Loaded = TypeVar("Loaded")
LOOK_S = 0.5
"""Seconds after which a rank that waits for a batch looks whether its loader processes are alive."""
_loader_numbers = count()
_borrowed = Borrowed()
_pools: list[BufferPool] = []
"""The pool of this process if it is a loader process, else empty."""
ORDERS = {4: (0, 3, 1, 2), 3: (0, 1, 2)}
"""Order that makes a batch of its memory, by the number of dimensions.

[samples, height, width, channels] becomes [samples, channels, height, width]; rows of patches stay.
"""
# Modules that a loader process needs. They are imported once, in the server that forks the processes, instead
# of in each.
PRELOADED = [
    "__main__",
    "torchvision.transforms",
    "open_clip",
    "trainer.data.loader",
    "trainer.data.eval_blocks",
]


def start_process_server() -> int:
    """Starts the server of loader processes, once; returns its process id.

    Call it before the first thread of this process, before NVML, CUDA and MPI: then the server is a fork and
    has this process's modules. Later it is a new interpreter, whose imports take seconds.
    """
    _process_context()
    hindrance = _hindrance()
    if hindrance:
        log.info(
            "%-12s its processes start in a new interpreter, which takes seconds: %s", "loader", hindrance
        )
    with spawning_by(_spawn_quietly if hindrance else _fork_instead):
        multiprocessing.forkserver.ensure_running()
    return process_server()


def _hindrance() -> str:
    """Returns what keeps this process from being forked; empty if nothing does."""
    if accelerator := in_use():
        return f"{accelerator} is in use"
    lost = threads_lost()
    return f"a fork would lose {many(len(lost), 'thread')} ({', '.join(lost)})" if lost else ""


def _fork_instead(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Runs `python ... -c CODE`, the last of the arguments, in a fork instead of a new interpreter.

    It takes the place of multiprocessing's own function, whose arguments it has; returns the process id.
    """
    if "forkserver" not in args[-1]:  # the tracker of semaphores is small, and needs nothing of ours
        return _spawn_quietly(path, args, passfds)
    pid = fork()
    if pid == 0:
        try:
            _close_all_but({0, 1, 2, *passfds})
            exec(args[-1], {})
        finally:  # also by SystemExit, with which the server ends
            os._exit(0)
    return pid


def _spawn_quietly(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Starts a process as multiprocessing does; the tracker of semaphores says nothing about a killed rank.

    That rank left its semaphores behind, which the tracker or the rank's supervisor removes.
    """
    quiet = ["-W", "ignore:resource_tracker"] if "resource_tracker" in args[-1] else []
    return spawn(path, [args[0], *quiet, *args[1:]], passfds)


_LONGEST_FOLDER = 80
"""Longest path of a folder for a socket, whose own path the kernel limits to 107 bytes."""


def _leave_nothing_behind() -> None:
    """Puts what multiprocessing leaves behind when it is killed where this rank's supervisor removes it.

    The server's socket goes into the rank's folder; the names of semaphores begin with that of the folder.
    multiprocessing's tracker removes those of a rank that was killed, unless it was killed with the rank.
    """
    if folder := os.environ.get(RANK_DIR):
        name_resources(f"/{Path(folder).name}", folder if len(folder) <= _LONGEST_FOLDER else None)


def _close_all_but(kept: Collection[int]) -> None:
    """Closes every other descriptor: the server must not keep its rank's pipes and sockets open."""
    faulthandler.disable()  # it would write into a descriptor that is somebody else's by then
    faulthandler.unregister(signal.SIGUSR1)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in kept:
            with suppress(OSError):  # the listing's own
                os.close(number)


def load(
    dataset: Dataset[Loaded | InputError], requests: Iterable[Any], workers: int, pin_memory: bool
) -> Iterator[Loaded]:
    """Yields the data set's answers to the requests, in order; loader processes live as long as the iterator.

    A request may be None, which has no answer: torch's loader asks for the next request before it gives a
    batch that is ready, so a request that is not known yet would withhold that batch.

    An InputError travels as a value and is raised here: torch would wrap it in a worker's traceback.
    """
    number = next(_loader_numbers)
    look_every(LOOK_S)
    loader = DataLoader(
        _Answering(dataset),
        sampler=requests,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=PREFETCHED if workers else None,
        collate_fn=_unchanged,
        pin_memory=pin_memory,
        multiprocessing_context=_process_context() if workers else None,
        worker_init_fn=partial(_prepare_process, number),
        # It gets its own generator: else the loader would draw its base seed from the model's.
        generator=torch.Generator(),
    )
    loaded = iter(loader)
    weakref.finalize(loaded, _borrowed.forget, number).atexit = False
    return _unwrapped(loaded, workers)


class _Answering(Dataset[Any]):
    """A data set that answers None with None."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitem__(self, request: Any) -> Any:
        return None if request is None else self._dataset[request]


def empty_to_send(*shape: int, room: int = 0) -> Tensor:
    """Returns uint8 of a batch's shape, not yet filled; the channels of a pixel are together in memory.

    In a loader process its memory is shared with the rank, so that nothing is copied on the way. Batches of
    several shapes use the same memory again if all ask for `room`, the bytes of the largest.
    """
    order = ORDERS[len(shape)]
    there = tuple(shape[order.index(place)] for place in range(len(order)))
    memory = _pools[0].empty(there, room) if _pools else torch.empty(there, dtype=torch.uint8)
    return memory.permute(order)


def to_send(images: Tensor) -> Lent | Tensor:
    """Returns what a loader process sends for a tensor of `empty_to_send`; any other tensor as it is."""
    return (_pools[0].lend(images, ORDERS[images.dim()]) if _pools else None) or images


def received(sent: Lent | Tensor) -> Tensor:
    """Returns the tensor that a loader process has sent with `to_send`."""
    return _borrowed.tensor(sent) if isinstance(sent, Lent) else sent


def _prepare_process(loader: int, worker: int) -> None:
    """Prepares a loader process: it ignores SIGTERM and ends when its rank is gone.

    Slurm sends SIGTERM to every process of a step, and torch makes its loader processes end by it, but the
    rank still needs them.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    _pools[:] = [BufferPool(loader, worker)]


def _process_context() -> multiprocessing.context.BaseContext:
    """Returns a context whose server forks the loader processes.

    Forking the rank itself is unsafe after MPI_Init and with other threads; the server has neither.
    """
    _leave_nothing_behind()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _unchanged(loaded: Loaded) -> Loaded:
    return loaded


def _unwrapped(loaded: Iterator[Loaded | InputError | None], workers: int) -> Iterator[Loaded]:
    try:
        for item in loaded:
            if isinstance(item, InputError):
                raise item
            if item is not None:
                yield item
    except (RuntimeError, ConnectionError, EOFError) as error:
        # The last two mean that a loader process died while it handed a batch over.
        if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker"):
            raise
        raise MachineError(
            f"a loader process died ({error or type(error).__name__}). With data.workers = {workers} each "
            f"rank has {workers} of them: check for the kernel's out-of-memory killer and for a small "
            "/dev/shm, and try fewer; data.workers = 0 loads in the rank itself."
        ) from error
    finally:
        # An exception's traceback would keep the iterator alive, and with it the loader processes.
        del loaded
