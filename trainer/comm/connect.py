"""Connects a rank to the others: chooses its device and creates the communication backend.

A backend's library is imported only by a job that asks for it.
"""

from collections.abc import Callable, Mapping

import torch

from trainer.comm.accelerator import accelerator_of, on_accelerator, uuid_of
from trainer.comm.backends import launcher_of, over_mpi, row_of
from trainer.comm.device import rank_device
from trainer.comm.protocol import Comm
from trainer.comm.reach import check_resolvable
from trainer.config import Job
from trainer.errors import InputError
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World, master_address, shared_devices

Implementation = Callable[[Job, World, torch.device, Heartbeat], Comm]
"""Class that implements the protocol."""


def connect(job: Job, world: World, env: Mapping[str, str], heartbeat: Heartbeat | None = None) -> Comm:
    """Collective: chooses this rank's device and joins the other ranks.

    Raises InputError if this rank has no usable device, MASTER_ADDR cannot be resolved, or Horovod is
    missing.
    """
    device = rank_device(job, world, env)
    heartbeat = heartbeat or Heartbeat.open(env)
    heartbeat.begin_stage("connecting")
    heartbeat.begin_collective("connecting the ranks")
    comm = _backend(job, world, device, env, heartbeat)
    heartbeat.set_waiting(False)
    heartbeat.reach("connected")
    if on_accelerator(device):
        records = comm.all_gather_object((world.rank, world.node, uuid_of(device)))
        shared_devices(records, accelerator_of(device).visible[0])
    return comm


def _backend(
    job: Job, world: World, device: torch.device, env: Mapping[str, str], heartbeat: Heartbeat
) -> Comm:
    row = row_of(job)
    try:
        implementation = IMPLEMENTATIONS[row.name]()
    except ImportError as error:
        raise InputError(
            f"comm.backend = {row.name}, but its library cannot be imported ({error}): {row.missing}"
        ) from None
    if not over_mpi(job, launcher_of(env)) and world.size > 1:
        check_resolvable(*master_address(env, world))
    return implementation(job, world, device, heartbeat)


def _torch() -> Implementation:
    from trainer.comm.torch_backend import TorchBackend

    return TorchBackend


def _fsdp() -> Implementation:
    from trainer.comm.fsdp_backend import FsdpBackend

    return FsdpBackend


def _horovod() -> Implementation:
    from trainer.comm.horovod_backend import HorovodBackend

    return HorovodBackend


IMPLEMENTATIONS: dict[str, Callable[[], Implementation]] = {
    "torch": _torch,
    "fsdp": _fsdp,
    "horovod": _horovod,
}
"""Functions that import the class of each row of BACKENDS, by its name."""
