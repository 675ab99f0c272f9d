"""torch.distributed: NCCL on GPUs, gloo on CPUs. One of the two places that name a communication library."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, HashStore, Store
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from trainer.comm.fixed import FixedReducer
from trainer.comm.meter import Mark, Meter
from trainer.comm.protocol import Reducer
from trainer.health.pulse import Pulse
from trainer.job import Job, TorchComm
from trainer.world import World

# torch 2.14 renamed both, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_DDP_KEYS = inspect.signature(DistributedDataParallel).parameters
_UNSYNCED_BUFFERS: dict[str, Any] = {next(key for key in ("forward_sync_buffers", "broadcast_buffers") if key in _DDP_KEYS): False}

_ENDED: list[Any] = []
"""Process groups that torch before 2.8 would free with the GIL held (pytorch #154976): that waits for gloo's threads, and one of them,
freeing a tensor that nobody else has, for the GIL. They go when the process does."""

_HOOKS: dict[str, Callable[..., Any]] = {
    "none": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


class TorchBackend:
    """Implements `protocol.Comm`; collectives that carry tensors run on `device`, the others over gloo."""

    def __init__(self, job: Job, world: World, device: torch.device, pulse: Pulse) -> None:
        self.world, self.device, self.pulse = world, device, pulse
        self._settings = job.comm.torch
        self._find_unused = job.comm.find_unused_parameters
        self._deterministic = job.comm.deterministic
        self._meter = Meter(device, pulse)
        chosen = self._settings.device_backend
        self._backend = chosen if chosen != "auto" else "nccl" if device.type == "cuda" else "gloo"
        self.name = f"torch ({self._backend})"
        dist.init_process_group(
            self._backend,
            store=_store(world, job.timeouts.init_s),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=job.timeouts.backstop_s),
        )
        # Objects and barriers stay off the GPUs.
        self._control: Any = dist.new_group(backend="gloo") if self._backend == "nccl" else None

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((self.world.size * tensor.shape[0], *tensor.shape[1:]))
        with self._meter.span("all_gather", tensor.nbytes):
            _all_gather(gathered, tensor.detach().contiguous())
        return gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        with self._meter.span("all_reduce", tensor.nbytes):
            dist.all_reduce(total)
        return total

    def exchange(self, tensor: Tensor, partner: int) -> Tensor:
        if partner == self.world.rank:
            return tensor.clone()
        received = torch.empty_like(tensor)
        with self._meter.span("exchange", tensor.nbytes):
            sending = [dist.P2POp(dist.isend, tensor, partner), dist.P2POp(dist.irecv, received, partner)]
            for work in dist.batch_isend_irecv(sending):
                work.wait()
        return received

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        total = tensor.clone()
        self._meter.sent("small all_reduce")
        work = dist.all_reduce(total, group=self._control, async_op=True)
        assert work is not None

        def wait() -> Tensor:
            with self._meter.waiting():
                work.wait()
            return total

        return wait

    def broadcast_(self, tensor: Tensor, root: int = 0) -> None:
        here = tensor.detach().to(self.device).contiguous()
        with self._meter.inside("broadcast"):
            dist.broadcast(here, root)
        tensor.detach().copy_(here)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        box = [value]
        with self._meter.inside("broadcast of an object"):
            dist.broadcast_object_list(box, root, group=self._control)
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world.size
        with self._meter.inside("all_gather of objects"):
            dist.all_gather_object(values, value, group=self._control)
        return values

    def barrier(self, timeout_s: float) -> None:
        # Not monitored_barrier: there only rank 0 keeps the limit, and the others wait for ever for a rank 0 that is late.
        arrivals = dist.all_reduce(torch.zeros(1), group=self._control, async_op=True)
        assert arrivals is not None
        try:
            with self._meter.inside("barrier"):
                arrivals.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TimeoutError(f"not all ranks reached the barrier within {timeout_s:g} s: {error}") from error

    def reducer(self, model: nn.Module) -> Reducer:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("the model has no parameter to train")
        if self._deterministic:
            return FixedReducer(model, self.all_reduce, self.world.size)
        return _Reducer(model, self._settings, self._find_unused, self._meter, self.device)

    def pop_seconds(self) -> float:
        return self._meter.pop()

    def pop_bytes(self) -> int:
        return self._meter.pop_bytes()

    def start_timeline(self, path: Path) -> None:
        """None: torch's profiler has its collectives too."""

    def stop_timeline(self) -> None:
        """None was begun."""

    def versions(self) -> Mapping[str, str]:
        if self._backend != "nccl":
            return {"gloo": torch.__version__}
        return {"nccl": ".".join(str(part) for part in torch.cuda.nccl.version())}

    def close(self) -> None:
        if torch.__version__ < "2.8":  # compares as a version, not as text
            _ENDED.append((dist.group.WORLD, self._control))
        dist.destroy_process_group()


class _Reducer:
    """DistributedDataParallel; the losses of its ranks are averaged, and so are the gradients."""

    def __init__(self, model: nn.Module, settings: TorchComm, find_unused: bool, meter: Meter, device: torch.device) -> None:
        self._meter = meter
        self._last_bucket: Mark | None = None
        self._hook = _HOOKS[settings.compression]
        self.module = self._ddp = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=settings.bucket_mb,
            static_graph=settings.static_graph,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            find_unused_parameters=find_unused,
            **_UNSYNCED_BUFFERS,  # synchronised batch norm keeps them equal
        )
        self._ddp.register_comm_hook(None, self._reduce_bucket)

    def _reduce_bucket(self, _state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The library's own hook; notes when the last bucket left, since what the backward pass takes after that is waiting."""
        self._last_bucket = self._meter.mark()
        self._meter.sent("all_reduce of gradients", bucket.buffer().nbytes)
        future: torch.futures.Future[Tensor] = self._hook(None, bucket)
        return future

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        with self._ddp.no_sync():
            yield

    def finish(self) -> None:
        if self._last_bucket is not None:  # DDP has waited at the end of the backward pass
            self._meter.since(self._last_bucket)
            self._last_bucket = None


def _store(world: World, init_s: float) -> Store:
    """Where ranks meet: MASTER_ADDR and MASTER_PORT, served by rank 0, or by torchrun's agent where it says so."""
    if world.size == 1:
        return HashStore()
    store: Store
    store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timedelta(seconds=init_s)))
    return store
