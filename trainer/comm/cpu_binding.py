"""Binds a rank and the loader processes that it will start to the CPUs next to its GPU. No torch."""

import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from trainer.config import Job
from trainer.errors import InputError
from trainer.sysinfo.topology import ROOT, choose_cpus
from trainer.text.wording import runs_text
from trainer.world.launchers import World, device_index

log = logging.getLogger("clipship")


def bind_cpus(
    job: Job, world: World, env: Mapping[str, str], also: Collection[int] = (), root: Path = ROOT
) -> None:
    """Binds this process and those of `also` to the CPUs next to its GPU; logs it, or why it does not.

    Threads and processes that they start later are bound with them. NVML, which is asked here, may start
    threads. Does nothing without a GPU, if `resources.bind_cpus` is false, or where the system has no such
    call.
    """
    if not job.resources.bind_cpus or job.resources.on_cpu or not hasattr(os, "sched_setaffinity"):
        return
    if (address := _gpu(job, world, env)) is None:
        return
    allowed = os.sched_getaffinity(0)
    choice = choose_cpus(address, world.local_size, job.resources.cpus_per_gpu, allowed, root)
    if choice.cpus:
        for process in (0, *also):
            os.sched_setaffinity(process, choice.cpus)
    how = f"bound to CPUs {runs_text(choice.cpus)}" if choice.cpus else f"not bound, {len(allowed)} CPUs"
    log.info("%-12s %s: %s", "CPUs", how, choice.reason)


def _gpu(job: Job, world: World, env: Mapping[str, str]) -> str | None:
    """Returns the PCI address of the rank's GPU; None if it has none, or if only its driver knows."""
    monitor = job.resources.row.monitor
    addresses = [] if monitor is None else monitor.visible_gpus(env)
    try:
        index = device_index(world, len(addresses))
    except InputError:  # `rank_device` refuses it
        return None
    return None if index is None else addresses[index]
