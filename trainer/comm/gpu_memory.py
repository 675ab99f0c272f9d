"""Memory of the ranks' GPUs."""

from trainer.comm.accelerator import memory_bytes, on_accelerator
from trainer.comm.protocol import Comm


def smallest_gpu_bytes(comm: Comm) -> int | None:
    """Collective: returns the bytes of the smallest GPU of all ranks; None if a rank computes on a CPU."""
    own = memory_bytes(comm.device) if on_accelerator(comm.device) else None
    sizes = comm.all_gather_object(own)
    return None if None in sizes else min(int(size) for size in sizes if size is not None)
