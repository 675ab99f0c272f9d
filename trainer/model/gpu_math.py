"""Settings of the GPU's libraries: how exactly they multiply float32, and how cuDNN chooses algorithms."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainer.comm.accelerator import is_cuda
from trainer.config import Job


def choose_gpu_math(job: Job, model: nn.Module, device: torch.device) -> None:
    """Sets, for this process, TF32 as the job's precision says, and whether cuDNN times its algorithms.

    Leaves everything as it is on a CPU.
    """
    if not is_cuda(device):
        return
    tf32 = job.model.precision == "tf32"
    # torch itself multiplies matrices in float32 and convolves in TF32 unless it is told.
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    wanted = job.model.cudnn_benchmark
    # Timings differ from run to run, and algorithms differ in the last bits.
    torch.backends.cudnn.benchmark = not job.comm.deterministic and (
        is_convolutional(model) if wanted is None else wanted
    )


def is_convolutional(model: nn.Module) -> bool:
    """Returns whether the image tower may be convolutional: it is none of open_clip's own transformers."""
    return not hasattr(model.visual, "transformer")


@contextmanager
def products_in_tf32(wanted: bool) -> Iterator[None]:
    """Lets matrix products of float32 in the block round their factors to TF32 on a GPU, if `wanted`."""
    before = torch.get_float32_matmul_precision()
    if wanted:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if wanted:
            torch.set_float32_matmul_precision(before)
