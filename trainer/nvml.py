"""NVIDIA's management library, which knows a GPU's state from outside. No torch; needs the driver's library only when asked."""

from contextlib import suppress
from typing import Any


def gpu_handle(uuid: object) -> Any:
    """Of the GPU with this UUID, with or without its "GPU-"; None where NVML cannot say. Its questions may raise pynvml.NVMLError."""
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{str(uuid).removeprefix('GPU-')}".encode())
    return None
