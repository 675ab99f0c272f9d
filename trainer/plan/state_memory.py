"""Text of `clipship check` about the steps that are kept in the memory of each node. Imports no torch."""

import shutil
from collections.abc import Iterator
from contextlib import suppress

from trainer.comm.backends import asks_for_memory, disk_only, keeps_in_memory
from trainer.config import Job
from trainer.config.kubernetes import shm_gb_of
from trainer.config.slurm import memory_bytes
from trainer.estimate.size import state_bytes
from trainer.sysinfo.shortage import SHARED_MEMORY
from trainer.world.state_parts import BUFFERS


def in_memory(job: Job) -> Iterator[str]:
    """Yields what restarts go on from, and how much memory of each node that takes; nothing without restarts.

    The size of a model whose config does not say it is known when the run starts.
    """
    if asks_for_memory(job) and not keeps_in_memory(job):
        yield disk_only(job)
    elif keeps_in_memory(job):
        size = _bytes(job)
        takes = f"{size / 1e9:.2f} GB" if size else "twice the size of weights and optimizer state"
        yield f"restarts go on from the newest step, kept in {takes} of each node's {SHARED_MEMORY}"


def too_little_memory(job: Job, *, local: bool) -> Iterator[str]:
    """Yields a sentence for each amount of memory that is known and too small for the steps that are kept."""
    size = _bytes(job)
    if not keeps_in_memory(job) or size is None:
        return
    for name, room in _known(job, local=local):
        if size > room:
            yield (
                f"{name} has {room / 1e9:.2f} GB, and the newest steps take {size / 1e9:.2f} GB: the run "
                f"would end before it trains; give {(size - room) / 1e9:.2f} GB more, or set "
                "recovery.keep_in_memory = false"
            )


def _bytes(job: Job) -> int | None:
    size = state_bytes(job)
    return None if size is None else BUFFERS * size


def _known(job: Job, *, local: bool) -> Iterator[tuple[str, int]]:
    """Yields names and bytes of the memory in which a node keeps the steps."""
    ranks = job.resources.ranks_per_node
    if local:
        with suppress(OSError):
            yield f"{SHARED_MEMORY} of this machine", shutil.disk_usage(SHARED_MEMORY).free
        return
    if "kubernetes" in job.schedulers:
        shm_bytes = int(shm_gb_of(job.kubernetes, job.resources) * 2**30)
        yield f"a worker's {SHARED_MEMORY} (kubernetes.shm_gb)", shm_bytes
    mem = job.slurm.mem if "slurm" in job.schedulers else None
    if mem is not None and (memory := memory_bytes(mem)) is not None:
        yield "the memory of a node (slurm.mem)", memory
    if job.resources.mem_gb_per_gpu is not None and (mem is None or "kubernetes" in job.schedulers):
        memory = int(job.resources.mem_gb_per_gpu * ranks * 2**30)
        yield "the memory of a node (resources.mem_gb_per_gpu)", memory
