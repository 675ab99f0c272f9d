"""The GPU's name, versions, and its two ceilings: products in bf16, copies within the device."""

import time
from collections.abc import Callable

import torch

_SIZE = 8192
_BYTES = 2**32


def seconds(work: Callable[[], object], times: int = 10) -> float:
    """Seconds of one call, after three that are not counted."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def main() -> None:
    """Print four lines."""
    found = torch.cuda.get_device_properties(0)
    print(
        f"{found.name}, {found.total_memory / 2**30:.1f} GiB, {found.multi_processor_count} multiprocessors"
    )
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}")
    a, b = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    print(f"bf16 product {_SIZE}^3: {2 * _SIZE**3 / seconds(lambda: a @ b) / 1e12:.0f} TFLOP/s")
    source = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rate = 2 * _BYTES / seconds(lambda: target.copy_(source)) / 1e12
    print(f"copy within the device: {rate:.2f} TB/s, read and write")


if __name__ == "__main__":
    main()
