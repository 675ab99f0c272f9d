"""torch.distributed: the accelerator's own library of collectives, such as NCCL, or gloo on CPUs.

This is one of the modules that name a communication library.
"""

import inspect
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, HashStore, Store, TCPStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.rendezvous import rendezvous as torch_rendezvous
from torch.nn.parallel import DistributedDataParallel

from trainer.comm.accelerator import accelerator_of, on_accelerator
from trainer.comm.objects import decode, encode
from trainer.comm.protocol import Reducer
from trainer.comm.reach import wait_until_served
from trainer.comm.reducers import DeterministicReducer, LocalReducer
from trainer.comm.shards import Shards, WholeModel
from trainer.comm.timer import CommTimer, Mark
from trainer.config import Job, TorchComm
from trainer.sysinfo.addresses import listening_address
from trainer.sysinfo.libraries import nccl_facts
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World, master_address

# torch 2.14 renamed all of these and warns about the old names.
all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
_DDP_KEYS = inspect.signature(DistributedDataParallel).parameters
_UNSYNCED_BUFFERS: dict[str, Any] = {
    next(key for key in ("forward_sync_buffers", "broadcast_buffers") if key in _DDP_KEYS): False
}

LAZY = "TORCH_GLOO_LAZY_INIT"
"""Variable by which gloo connects two ranks when they first talk to each other, from torch 2.8 on."""
MESH_RANKS = 64
"""Ranks up to which gloo connects each with every other when they meet."""
_EARLY = "all_gather of features"
_SERVED_S = 10.0
_ENDED: list[Any] = []
"""Process groups that are kept until the process ends, for torch before 2.8 (pytorch #154976).

That torch frees a group with the GIL held and waits for gloo's threads meanwhile; one of them may itself wait
for the GIL, to free a tensor, so both would wait for ever.
"""

_HOOKS: dict[str, Callable[..., Any]] = {
    "none": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


class TorchBackend:
    """Implements `protocol.Comm`; collectives of tensors run on `device`, the others over gloo."""

    def __init__(self, job: Job, world: World, device: torch.device, heartbeat: Heartbeat) -> None:
        self.world, self.device, self.heartbeat = world, device, heartbeat
        self._settings = job.comm.torch
        self._find_unused = job.comm.find_unused_parameters
        self._deterministic = job.comm.deterministic
        self._timer = CommTimer(device, heartbeat)
        chosen = self._settings.device_backend
        self._backend = chosen if chosen != "auto" else accelerator_of(device).collectives
        self.name = f"torch ({self._backend})"
        connect_when_needed(world.size)
        dist.init_process_group(
            self._backend,
            store=_store(world, job.timeouts.init_s),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=job.timeouts.backstop_s),
        )
        # Objects and barriers stay off the GPUs.
        self._control: Any = dist.new_group(backend="gloo") if self._backend != "gloo" else None
        self._beside: Any = self._group_beside()

    def _group_beside(self) -> Any:
        """Returns the process group of gathers that run beside a forward pass. Collective.

        None is the group of all collectives, which are free during a forward pass here.
        """
        return None

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((self.world.size * tensor.shape[0], *tensor.shape[1:]))
        with self._timer.span("all_gather", tensor.nbytes):
            all_gather_single(gathered, tensor.detach().contiguous())
        return gathered

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        gathered = tensor.new_empty((self.world.size * tensor.shape[0], *tensor.shape[1:]))
        with self._timer.starting(_EARLY, tensor.nbytes):
            work = all_gather_single(
                gathered, tensor.detach().contiguous(), group=self._beside, async_op=True
            )

        def wait() -> Tensor:
            with self._timer.waiting(_EARLY):
                work.wait()  # on a GPU the stream waits, and not the host
            return gathered

        return wait

    def all_reduce(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        with self._timer.span("all_reduce", tensor.nbytes):
            dist.all_reduce(total)
        return total

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        rows = tensor.new_empty((tensor.shape[0] // self.world.size, *tensor.shape[1:]))
        with self._timer.span("reduce_scatter", tensor.nbytes):
            reduce_scatter_single(rows, tensor.detach().contiguous())
        return rows

    def exchange(self, tensor: Tensor, partner: int) -> Tensor:
        if partner == self.world.rank:
            return tensor.clone()
        received = torch.empty_like(tensor)
        with self._timer.span("exchange", tensor.nbytes):
            both = [dist.P2POp(dist.isend, tensor, partner), dist.P2POp(dist.irecv, received, partner)]
            for work in dist.batch_isend_irecv(both):  # neither waits for the other
                work.wait()
        return received

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        total = tensor.clone()
        with self._timer.starting("small all_reduce"):
            work = dist.all_reduce(total, group=self._control, async_op=True)
        assert work is not None

        def wait() -> Tensor:
            with self._timer.waiting("small all_reduce"):
                work.wait()
            return total

        return wait

    def broadcast_(self, tensor: Tensor, root: int = 0) -> None:
        here = tensor.detach().to(self.device).contiguous()
        with self._timer.inside("broadcast"):
            dist.broadcast(here, root)
        tensor.detach().copy_(here)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        message = encode(value) if self.world.rank == root else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([message.numel()])
        with self._timer.inside("broadcast of an object"):
            dist.broadcast(size, root, group=self._control)
            if self.world.rank != root:
                message = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(message, root, group=self._control)
        return decode(message)

    def all_gather_object(self, value: Any) -> list[Any]:
        message, ranks = encode(value), self.world.size
        sizes = torch.empty(ranks, dtype=torch.int64)
        with self._timer.inside("all_gather of objects"):
            all_gather_single(sizes, torch.tensor([message.numel()]), group=self._control)
            longest = int(sizes.max())
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: message.numel()] = message
            messages = torch.empty(ranks * longest, dtype=torch.uint8)
            all_gather_single(messages, padded, group=self._control)
        return [
            decode(row[:size])
            for row, size in zip(messages.view(ranks, longest), sizes.tolist(), strict=True)
        ]

    def barrier(self, timeout_s: float) -> None:
        # monitored_barrier is not used: there only rank 0 keeps the limit, and the others wait for ever for a
        # late rank 0.
        arrivals = dist.all_reduce(torch.zeros(1), group=self._control, async_op=True)
        assert arrivals is not None
        try:
            with self._timer.inside("barrier"):
                arrivals.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TimeoutError(
                f"not all ranks reached the barrier within {timeout_s:g} s: {error}"
            ) from error

    def timed(self, collective: str, nbytes: int) -> AbstractContextManager[None]:
        """Returns a context that counts as one collective of `nbytes` bytes of this rank. Not collective."""
        return self._timer.span(collective, nbytes)

    def reducer(self, model: nn.Module) -> Reducer:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("the model has no parameter to train")
        if self.world.size == 1:
            return LocalReducer(model)
        if self._deterministic:
            return DeterministicReducer(
                model, self.all_reduce, self.world.size, find_unused=self._find_unused
            )
        return _Reducer(model, self._settings, self._find_unused, self._timer, self.device)

    def pop_seconds(self) -> float:
        return self._timer.pop()

    def pop_bytes(self) -> int:
        return self._timer.pop_bytes()

    def start_timeline(self, path: Path) -> None:
        """Does nothing: torch's profiler records the collectives already."""

    def stop_timeline(self) -> None:
        """Does nothing, since nothing was started."""

    def versions(self) -> Mapping[str, str]:
        if self._backend != "nccl":
            return {self._backend: torch.__version__}
        compiled = ".".join(str(part) for part in torch.cuda.nccl.version())
        return {"nccl": nccl_facts().get("nccl_mapped", compiled)}

    def close(self) -> None:
        if torch.__version__ < "2.8":  # compares as a version, not as text
            _ENDED.append((dist.group.WORLD, self._control))
        dist.destroy_process_group()


class _Reducer:
    """DistributedDataParallel; it averages the gradients over the ranks."""

    def __init__(
        self, model: nn.Module, settings: TorchComm, find_unused: bool, timer: CommTimer, device: torch.device
    ) -> None:
        self._timer = timer
        self._last_bucket: Mark | None = None
        self._hook = _HOOKS[settings.compression]
        self.shards: Shards = WholeModel(model)
        self.module = self._ddp = DistributedDataParallel(
            model,
            device_ids=[device.index] if on_accelerator(device) else None,
            bucket_cap_mb=settings.bucket_mb,
            static_graph=settings.static_graph,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            find_unused_parameters=find_unused,
            **_UNSYNCED_BUFFERS,  # batch norm keeps them equal, synchronised or not
        )
        self._ddp.register_comm_hook(None, self._reduce_bucket)

    def _reduce_bucket(self, _state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Runs the library's own hook and marks when the last bucket left.

        The backward pass spends the time after that mark waiting, and raises there what any bucket met.
        """
        self._last_bucket, nbytes = self._timer.mark(), bucket.buffer().nbytes
        with self._timer.starting("all_reduce of gradients", nbytes, then_waits=bucket.is_last()):
            future: torch.futures.Future[Tensor] = self._hook(None, bucket)
        return future

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        with self._ddp.no_sync():
            yield

    def finish(self) -> None:
        if self._last_bucket is not None:  # DDP has waited already, at the end of the backward pass
            self._timer.arrived()
            self._timer.since(self._last_bucket)
            self._last_bucket = None


def connect_when_needed(ranks: int) -> None:
    """Lets gloo connect two ranks of a large world only when they first talk to each other.

    Else each is connected to every other: 50 million connections for 10,000 ranks (pytorch/gloo #419).
    """
    if ranks > MESH_RANKS:
        os.environ.setdefault(LAZY, "1")


def _store(world: World, init_s: float) -> Store:
    """Returns the store at which ranks meet.

    Rank 0 serves it at MASTER_ADDR and MASTER_PORT, on that address alone. If torchrun's agent says that it
    serves the store, the agent's is used.
    """
    if world.size == 1:
        return HashStore()
    host, port = master_address(os.environ, world)
    timeout = timedelta(seconds=init_s)
    address = listening_address(host)
    if world.rank or address is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        wait_until_served(host, port, min(_SERVED_S, init_s / 4))
        store: Store
        store, _, _ = next(torch_rendezvous("env://", world.rank, world.size, timeout=timeout))
        return store
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # torch itself would listen on every interface.
    with socket.create_server((address, port), family=family) as listener:
        return TCPStore(
            address,
            port,
            world.size,
            is_master=True,
            timeout=timeout,
            master_listen_fd=listener.detach(),
            use_libuv=torch.__version__ >= "2.8",  # before, it takes no socket that listens already (#150215)
        )
