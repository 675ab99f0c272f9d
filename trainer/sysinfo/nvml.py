"""NVIDIA's management library (NVML), which knows a GPU's state from outside the process.

Imports no torch, and loads the driver's library only when it is asked.
"""

from contextlib import suppress
from typing import Any


def gpu_handle(uuid: object) -> Any:
    """Returns the NVML handle of the GPU with this UUID, with or without the prefix "GPU-".

    Returns None if NVML cannot tell. Calls that use the handle may raise pynvml.NVMLError.
    """
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{str(uuid).removeprefix('GPU-')}".encode())
    return None
