"""What a rank's node offers: memory shared between processes, open files, disk, the GPU's own state. No torch."""

import os
import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.nvml import gpu_handle
from trainer.preflight.reading import Gpu

SHARED_MEMORY = Path("/dev/shm")

# NVML's nvmlClocksEventReason* bits that mean that something is wrong; idle and application clocks are not among them.
_SLOWED = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def shared_memory_bytes() -> int | None:
    """Free bytes of /dev/shm, or None where there is none."""
    return _free(SHARED_MEMORY)


def disk_bytes(folder: Path) -> int | None:
    """Free bytes of the file system that holds the folder, or would hold it."""
    return next((_free(place) for place in (folder, *folder.parents) if place.exists()), None)


def open_files() -> int:
    """The soft limit of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def gpu(uuid: object) -> Gpu | None:
    """The state of the GPU with this UUID, or None where NVML cannot say."""
    import pynvml

    handle = gpu_handle(uuid)
    with suppress(pynvml.NVMLError):
        return _state(pynvml, handle) if handle is not None else None
    return None


def _state(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    slowed = _asked(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle), 0)
    errors = _asked(
        nvml,
        lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
        0,
    )
    processes = _asked(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), [])
    name = nvml.nvmlDeviceGetName(handle)
    return Gpu(
        name=name.decode() if isinstance(name, bytes) else str(name),
        free_bytes=int(memory.free),
        total_bytes=int(memory.total),
        uncorrected_errors=int(errors),
        slowed_by=tuple(reason for bit, reason in _SLOWED.items() if slowed & bit),
        other_processes=sum(process.pid != os.getpid() for process in processes),
    )


def _asked(nvml: Any, question: Callable[[], Any], otherwise: Any) -> Any:
    """What NVML answers; not every GPU has every counter."""
    try:
        return question()
    except nvml.NVMLError:
        return otherwise


def _free(folder: Path) -> int | None:
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return None
