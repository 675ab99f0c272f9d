"""NVIDIA's management library (NVML), which knows a GPU's state from outside the process.

Imports no torch, and loads the driver's library only when it is asked.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuHere:
    """One GPU of this machine."""

    name: str
    memory: int
    """Bytes of its memory."""


def gpus_here() -> list[GpuHere]:
    """Returns this machine's GPUs; empty if the driver or the package that asks it is missing."""
    try:
        import pynvml
    except ModuleNotFoundError:  # an installation for a login node
        return []
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            GpuHere(str(pynvml.nvmlDeviceGetName(handle)), int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))
            for handle in handles
        ]
    except pynvml.NVMLError:
        return []


def gpu_handle(uuid: object) -> Any:
    """Returns the NVML handle of the GPU with this UUID, with or without the prefix "GPU-".

    Returns None if NVML cannot tell. Calls that use the handle may raise pynvml.NVMLError.
    """
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{str(uuid).removeprefix('GPU-')}".encode())
    return None
