"""Horovod over NCCL, MPI or gloo. This is one of the modules that name a communication library."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import psutil
import torch
from torch import Tensor, nn

from trainer.comm.accelerator import on_accelerator
from trainer.comm.backends import BUCKET_MB, horovods_cycle_ms, launcher_of, over_mpi
from trainer.comm.buckets import buckets_of
from trainer.comm.horovod_meeting import meet
from trainer.comm.objects import decode, encode
from trainer.comm.protocol import Reducer
from trainer.comm.reducers import DeterministicReducer, LocalReducer, no_gradient
from trainer.comm.shards import Shards, WholeModel
from trainer.comm.timer import CommTimer
from trainer.config import HorovodComm, Job
from trainer.errors import InputError
from trainer.sysinfo.addresses import address_towards, bridges_of_containers, is_here
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World

_EARLY = "all_gather of features"
_POLL_S = 0.01
_LOOK_S = 0.0002
_MPI_INCLUDES, _MPI_EXCLUDES = "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"
_MPI_LEAVES_OUT = ("127.0.0.1/8", "sppp")
"""Open MPI itself leaves these out; a list of ours replaces its own."""


class HorovodBackend:
    """Implements `protocol.Comm` on Horovod's sums; it never uses Horovod's averaging gather."""

    def __init__(self, job: Job, world: World, device: torch.device, heartbeat: Heartbeat) -> None:
        self.world, self.device, self.heartbeat = world, device, heartbeat
        self._settings = job.comm.horovod
        self._find_unused = job.comm.find_unused_parameters
        self._deterministic = job.comm.deterministic
        self._timer = CommTimer(device, heartbeat)
        self.name = "horovod"
        meets = not over_mpi(job, launcher_of(os.environ))
        close = meet(world, job.timeouts.init_s) if meets else None
        _choose_interface()
        _leave_out_bridges()
        _choose_cycle(device)
        hvd.init()
        if (hvd.rank(), hvd.size()) != (world.rank, world.size):
            raise InputError(
                f"Horovod says rank {hvd.rank()} of {hvd.size()}, "
                f"but the launcher's variables say rank {world.rank} of {world.size}: "
                "start the ranks with `clipship run`, mpirun, horovodrun or srun --mpi=pmix, "
                "and with the MPI that Horovod was built for"
            )
        if close is not None:
            self.barrier(job.timeouts.init_s)  # all have met
            close()

    def all_gather(self, tensor: Tensor) -> Tensor:
        with self._timer.span("all_gather", tensor.nbytes):
            gathered: Tensor = self._done(hvd.allgather_async(tensor.detach().contiguous()))
        return gathered

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        with self._timer.starting(_EARLY, tensor.nbytes):
            handle = hvd.allgather_async(tensor.detach().contiguous(), name="clipship.features")

        def wait() -> Tensor:
            with self._timer.waiting(_EARLY):
                gathered: Tensor = self._done(handle)
            return gathered

        return wait

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with self._timer.span("all_reduce", tensor.nbytes):
            total: Tensor = self._done(hvd.allreduce_async(tensor.detach().contiguous(), op=hvd.Sum))
        return total

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        with self._timer.span("reduce_scatter", tensor.nbytes):
            whole = tensor.detach().contiguous()
            if self.device.type == "cpu":
                return self._scattered(whole)
            rows: Tensor = hvd.reducescatter(whole, op=hvd.Sum)
        return rows

    def _scattered(self, whole: Tensor) -> Tensor:
        """Returns this rank's rows of the sum, from an exchange of rows that sends as many bytes.

        Gloo's reduce-scatter cuts the sockets' send buffers down to its own blocks for good: later transfers
        of 16 MiB between two ranks took 19 s.
        """
        size = self.world.size
        splits = torch.full((size,), whole.numel() // size, dtype=torch.int32)
        received, _ = self._done(hvd.alltoall_async(whole.flatten(), splits, name="clipship.reduce_scatter"))
        return received.view(size, len(whole) // size, *whole.shape[1:]).sum(0)  # type: ignore[no-any-return]

    def exchange(self, tensor: Tensor, partner: int) -> Tensor:
        splits = [tensor.numel() * (rank == partner) for rank in range(self.world.size)]
        with self._timer.span("exchange", tensor.nbytes):
            handle = hvd.alltoall_async(
                tensor.flatten(), torch.tensor(splits, dtype=torch.int32), name="clipship.exchange"
            )
            received, _ = self._done(handle)
        return received.view_as(tensor)  # type: ignore[no-any-return]

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        with self._timer.starting("small all_reduce"):
            handle = hvd.allreduce_async(tensor, name="clipship.small", op=hvd.Sum)

        def wait() -> Tensor:
            with self._timer.waiting("small all_reduce"):
                total: Tensor = self._done(handle)
            return total

        return wait

    def broadcast_(self, tensor: Tensor, root: int = 0) -> None:
        with self._timer.inside("broadcast"):
            here = hvd.broadcast(tensor.detach().to(self.device).contiguous(), root_rank=root)
        tensor.detach().copy_(here)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        # Horovod's own collectives of objects are not used: they read pickles.
        message = encode(value) if self.world.rank == root else torch.empty(0, dtype=torch.uint8)
        with self._timer.inside("broadcast of an object"):
            size = hvd.broadcast(torch.tensor([message.numel()]), root_rank=root, name="clipship.object.size")
            if self.world.rank != root:
                message = torch.empty(int(size), dtype=torch.uint8)
            return decode(hvd.broadcast(message, root_rank=root, name="clipship.object"))

    def all_gather_object(self, value: Any) -> list[Any]:
        message = encode(value)
        with self._timer.inside("all_gather of objects"):
            sizes = hvd.allgather(torch.tensor([message.numel()]), name="clipship.objects.sizes")
            messages = hvd.allgather(message, name="clipship.objects")
        return [decode(part) for part in messages.split(sizes.tolist())]

    def barrier(self, timeout_s: float) -> None:
        handle = hvd.allreduce_async(torch.zeros(1), name="clipship.barrier", op=hvd.Sum)
        limit = time.monotonic() + timeout_s
        with self._timer.inside("barrier"):
            while not hvd.poll(handle):
                if time.monotonic() > limit:
                    raise TimeoutError(
                        f"not all ranks reached the barrier within {timeout_s:g} s "
                        "(Horovod's stall check logs which ranks are missing)"
                    )
                time.sleep(_POLL_S)
            hvd.synchronize(handle)

    def reducer(self, model: nn.Module) -> Reducer:
        if self.world.size == 1:
            return LocalReducer(model)
        if self._deterministic:
            return DeterministicReducer(
                model, self.all_reduce, self.world.size, find_unused=self._find_unused
            )
        return _Reducer(model, self._settings, self._find_unused, self._timer, self.world.size, self._done)

    def _done(self, handle: Any) -> Any:
        """Waits for a collective and returns its result, on a CPU without taking it from Horovod's threads.

        `hvd.synchronize` turns in a circle while it waits.
        """
        while self.device.type == "cpu" and not hvd.poll(handle):
            time.sleep(_LOOK_S)
        return hvd.synchronize(handle)

    def pop_seconds(self) -> float:
        return self._timer.pop()

    def pop_bytes(self) -> int:
        return self._timer.pop_bytes()

    def start_timeline(self, path: Path) -> None:
        hvd.start_timeline(str(path), mark_cycles=True)

    def stop_timeline(self) -> None:
        hvd.stop_timeline()

    def versions(self) -> Mapping[str, str]:
        from horovod import __version__

        built = [
            name
            for name, has in (
                ("nccl", hvd.nccl_built()),
                ("mpi", hvd.mpi_built()),
                ("gloo", hvd.gloo_built()),
            )
            if has
        ]
        return {"horovod": __version__, "horovod_built_with": ",".join(built)}

    def close(self) -> None:
        hvd.shutdown()


def _choose_cycle(device: torch.device) -> None:
    """Sets the time between two rounds of negotiation, unless it is set or Horovod is to try some."""
    if os.environ.get("HOROVOD_AUTOTUNE", "0") not in ("", "0"):
        return
    over_mpi = "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in os.environ
    cycle_ms = horovods_cycle_ms(gpus=on_accelerator(device), over_mpi=over_mpi)
    os.environ.setdefault("HOROVOD_CYCLE_TIME", f"{cycle_ms:g}")


def _choose_interface() -> None:
    """Sets HOROVOD_GLOO_IFACE to the network interface that leads to the server of the ranks' addresses.

    An interface that is named already stays. Horovod takes only an interface's name. Without such a server
    nothing is set. Raises InputError if Gloo would not find this host's own name.
    """
    server = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    if not server:
        return
    _check_own_name()
    if not os.environ.get("HOROVOD_GLOO_IFACE"):
        own = address_towards(server)
        names = (
            name
            for name, addresses in psutil.net_if_addrs().items()
            for entry in addresses
            if entry.address == own
        )
        os.environ["HOROVOD_GLOO_IFACE"] = next(names, "")


def _check_own_name() -> None:
    """Raises InputError if this host's name has no address of its own: Horovod over Gloo would crash."""
    name = socket.gethostname()
    if is_here(name):
        return
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
        given = f"has only addresses of other machines ({', '.join(sorted(found))})"
    except OSError as problem:
        given = f"has no address ({problem.strerror})"
    raise InputError(
        f"this host's own name, {name}, {given}, but Horovod over Gloo needs one of this machine: give it "
        'one in /etc/hosts, or use comm.launcher = "mpirun"'
    )


def _leave_out_bridges() -> None:
    """Keeps Open MPI off the bridges to containers, unless a variable names its interfaces already.

    It connects to another machine's addresses on all interfaces; where both have docker's bridge, with one
    address, it reaches itself and waits for ever.
    """
    bridges = bridges_of_containers()
    if bridges and os.environ.keys().isdisjoint((_MPI_INCLUDES, _MPI_EXCLUDES)):
        os.environ[_MPI_EXCLUDES] = ",".join([*_MPI_LEAVES_OUT, *bridges])


class _Reducer:
    """Sends each bucket of gradients when the last backward pass has filled it; `finish` waits for them.

    One tensor at a time travels: Horovod copies what it sends together into a buffer of its own, and back.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: HorovodComm,
        find_unused: bool,
        timer: CommTimer,
        world_size: int,
        done: Callable[[Any], Any],
    ) -> None:
        self.module = model
        self.shards: Shards = WholeModel(model)
        self._find_unused, self._timer, self._world_size, self._done = find_unused, timer, world_size, done
        self._bucket_bytes = int((BUCKET_MB if settings.fusion_mb is None else settings.fusion_mb) * 2**20)
        self._shortened = settings.compression == "fp16"
        self._accumulating = False
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._order: list[int] | None = []
        """Numbers of the parameters in the order of their gradients in the first step, then None."""
        self._numbers = {id(p): number for number, p in enumerate(self._parameters.values())}
        self._lay_out(list(self._parameters.values())[::-1])  # about the order of a backward pass
        for parameter in self._parameters.values():
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _lay_out(self, parameters: Sequence[nn.Parameter]) -> None:
        keep = parameters[0].device.type == "cpu" if parameters else False
        self._buckets = buckets_of(
            parameters, self._bucket_bytes, torch.float16 if self._shortened else None, keep=keep
        )
        self._bucket_of = {id(p): number for number, b in enumerate(self._buckets) for p in b.parameters}
        self._sent: dict[int, Any] = {}  # number of a bucket -> handle

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _ready(self, parameter: nn.Parameter) -> None:
        if self._accumulating:
            return
        if self._order is not None:
            self._order.append(self._numbers[id(parameter)])
        self._fill(parameter)

    def _fill(self, parameter: nn.Parameter) -> None:
        number = self._bucket_of[id(parameter)]
        bucket = self._buckets[number]
        # Multiplied before the sum, which could overflow in fp16, and before it becomes fp16.
        bucket.fill(parameter, 1.0 / self._world_size)
        if bucket.full:
            name = f"gradients.{number}.{'first' if self._order is not None else 'then'}"
            self._sent[number] = hvd.allreduce_async_(bucket.flat(), name=name, op=hvd.Sum)

    def finish(self) -> None:
        nbytes = sum(bucket.nbytes for bucket in self._buckets)
        with self._timer.span("all_reduce of gradients", nbytes):
            shared = self._fill_missing()
            for number, bucket in enumerate(self._buckets):
                self._done(self._sent.pop(number))
                bucket.hand_out(shared)
            if self._order is not None:
                self._lay_out_anew(self._order)

    def _lay_out_anew(self, order: list[int]) -> None:
        """Collective: puts together what became ready together in the first step of rank 0."""
        order += sorted(set(self._numbers.values()) - set(order))
        agreed = self._done(hvd.broadcast_async(torch.tensor(order), 0, name="clipship.order"))
        parameters = list(self._parameters.values())
        self._lay_out([parameters[number] for number in agreed.tolist()])
        self._order = None

    def _fill_missing(self) -> list[nn.Parameter]:
        """Fills with zeros what this rank did not use; returns the parameters that some rank used.

        Raises RuntimeError if a gradient is missing and `find_unused` is off.
        """
        parameters = list(self._parameters.values())
        filled = [self._buckets[self._bucket_of[id(p)]].has(p) for p in parameters]
        missing = [name for name, has in zip(self._parameters, filled, strict=True) if not has]
        if not self._find_unused:
            if missing:
                raise RuntimeError(no_gradient(missing))
            return parameters
        # It needs a name: Horovod numbers unnamed tensors by how many a rank has sent, and here the ranks
        # have sent different numbers of them.
        used = torch.tensor([float(p.grad is not None) for p in parameters])
        ranks = self._done(hvd.allreduce_async(used, name="clipship.used", op=hvd.Sum)).tolist()
        for name in missing:
            self._fill(self._parameters[name])
        return [p for p, count in zip(parameters, ranks, strict=True) if count]
