"""Measures one GPU by itself: its products, and its copies from the host and within it. Not collective."""

import statistics
import time
from collections.abc import Callable

import torch

from trainer.comm.accelerator import on_accelerator, pins_memory, runtime
from trainer.preflight.measurements import Timing

_REPEATS = 5
_TOGETHER = 8
"""Calls that are timed together: each takes some 0.2 ms, and the host 0.02 ms to wait for it."""


def time_copy(device: torch.device, size: int = 1 << 26) -> Timing | None:
    """Times copies of `size` bytes from pinned host memory to the GPU; None without a GPU."""
    if not on_accelerator(device):
        return None
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pins_memory(device))
    return Timing(size, _gpu_seconds(device, lambda: host.to(device)))


def time_copy_within(device: torch.device, size: int = 1 << 28) -> Timing | None:
    """Times copies of `size` bytes within the GPU, read and written; None without a GPU."""
    if not on_accelerator(device):
        return None
    source, target = torch.empty((2, size), dtype=torch.uint8, device=device)
    return Timing(2 * size, _gpu_seconds(device, lambda: target.copy_(source), _TOGETHER))


def product_tflops(device: torch.device, size: int = 1 << 12) -> float | None:
    """Measures matrix products in bf16, in 10^12 operations a second; None without a GPU."""
    if not on_accelerator(device):
        return None
    factor = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / _gpu_seconds(device, lambda: factor @ factor, _TOGETHER) / 1e12


def _gpu_seconds(device: torch.device, work: Callable[[], object], together: int = 1) -> float:
    """Returns the median seconds of a call, until the GPU is done; the first calls do not count.

    `together` calls are timed as one, where a single call is over too soon.
    """
    seconds = []
    for _ in range(1 + _REPEATS):
        runtime(device).synchronize()
        start = time.perf_counter()
        for _ in range(together):
            work()
        runtime(device).synchronize()
        seconds.append((time.perf_counter() - start) / together)
    return max(statistics.median(seconds[1:]), 1e-9)
