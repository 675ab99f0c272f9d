"""The GPU's name, versions, and its two ceilings: products in bf16, copies within the device."""

import torch

from trainer.preflight.gpu_probe import product_tflops, time_copy_within

_SIZE = 8192
_BYTES = 2**31


def main() -> None:
    """Print four lines."""
    found = torch.cuda.get_device_properties(0)
    print(
        f"{found.name}, {found.total_memory / 2**30:.1f} GiB, {found.multi_processor_count} multiprocessors"
    )
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}")
    gpu = torch.device("cuda")
    print(f"bf16 products: {product_tflops(gpu, _SIZE):.0f} TFLOP/s")
    copy = time_copy_within(gpu, _BYTES)
    assert copy is not None
    print(f"copy within the device: {copy.bytes_per_s / 1e12:.2f} TB/s, read and write")


if __name__ == "__main__":
    main()
