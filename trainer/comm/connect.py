"""From a world to a communication backend on the right device. Horovod is imported only by a job that asks for it."""

import os
import socket
import time
from collections.abc import Mapping

import torch

from trainer.comm.protocol import Comm
from trainer.errors import InputError
from trainer.health.pulse import Pulse
from trainer.job import Job
from trainer.world import World, device_index, rendezvous, shared_devices

RESOLVE_S = 30.0
"""A name server that is busy says so, and a pod's name may be younger than its ranks."""


def connect(job: Job, world: World, env: Mapping[str, str], pulse: Pulse | None = None) -> Comm:
    """Collective: take this rank's device and meet the others. Raises InputError where that cannot work."""
    device = _device(world)
    pulse = pulse or Pulse.open(env)
    pulse.collective("meeting the others")
    comm = _backend(job, world, device, env, pulse)
    pulse.waiting(False)
    if device.type == "cuda":
        shared_devices(comm.all_gather_object((world.rank, world.node, str(torch.cuda.get_device_properties(device).uuid))))
    return comm


def _device(world: World) -> torch.device:
    index = device_index(world, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if index is None:
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _backend(job: Job, world: World, device: torch.device, env: Mapping[str, str], pulse: Pulse) -> Comm:
    if job.comm.backend == "horovod":
        return _horovod(job, world, device, pulse)
    from trainer.comm.torch_backend import TorchBackend

    if world.size > 1:
        _reachable(*rendezvous(env, world))
    return TorchBackend(job, world, device, pulse)


def _horovod(job: Job, world: World, device: torch.device, pulse: Pulse) -> Comm:
    try:
        from trainer.comm.horovod_backend import HorovodBackend
    except ImportError as error:
        raise InputError(
            f"comm.backend = horovod, but Horovod cannot be imported ({error}): `make horovod` builds it, or use backend = torch"
        ) from None
    return HorovodBackend(job, world, device, pulse)


def _reachable(host: str, port: int) -> None:
    limit = time.monotonic() + RESOLVE_S
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if getattr(error, "errno", None) != socket.EAI_AGAIN or time.monotonic() > limit:
                raise InputError(f"MASTER_ADDR = {host!r} cannot be resolved on {os.uname().nodename}: {error}") from error
        time.sleep(1)
