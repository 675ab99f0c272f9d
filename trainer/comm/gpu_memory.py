"""Memory of the ranks' GPUs."""

import torch

from trainer.comm.protocol import Comm


def smallest_gpu_bytes(comm: Comm) -> int | None:
    """Collective: returns the bytes of the smallest GPU of all ranks; None if a rank computes on a CPU."""
    on_gpu = comm.device.type == "cuda"
    own = torch.cuda.get_device_properties(comm.device).total_memory if on_gpu else None
    sizes = comm.all_gather_object(own)
    return None if None in sizes else min(int(size) for size in sizes if size is not None)
