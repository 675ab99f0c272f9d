"""The GPU's name, versions, and its two ceilings: products in bf16, copies within the device."""

import json
import os

import torch

from trainer.preflight.gpu_probe import product_tflops, time_copy_within

_SIZE = 8192
_BYTES = 2**31


def main() -> None:
    """Print a line, and the same as JSON."""
    found, gpu = torch.cuda.get_device_properties(0), torch.device("cuda")
    copy = time_copy_within(gpu, _BYTES)
    assert copy is not None
    about = {
        "gpu": found.name,
        "gpus": torch.cuda.device_count(),
        "memory_gib": round(found.total_memory / 2**30, 1),
        "multiprocessors": found.multi_processor_count,
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "bf16_tflops": round(product_tflops(gpu, _SIZE) or 0),
        "copy_tb_s": round(copy.bytes_per_s / 1e12, 2),
    }
    print(
        "{gpus} x {gpu}, {memory_gib} GiB, {multiprocessors} multiprocessors, {cpus} CPUs, torch {torch}, "
        "CUDA {cuda}, NCCL {nccl}; products in bf16 {bf16_tflops} TFLOP/s, copies within the device "
        "{copy_tb_s} TB/s (read and write)".format(**about)
    )
    print(json.dumps(about))


if __name__ == "__main__":
    main()
