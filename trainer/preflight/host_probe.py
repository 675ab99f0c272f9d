"""Probes a rank's node: memory shared between processes, open files, disk, RDMA devices, the GPU's own state.

Probes the place of the run folder, too. No torch.
"""

import os
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.config import Job
from trainer.errors import InputError
from trainer.estimate.size import checkpoint_bytes
from trainer.preflight.measurements import Gpu, Placement, Rdma
from trainer.run.checkpoints import step_folders
from trainer.run.folder import check_writable_folder, not_written
from trainer.run.layout import CHECKPOINTS
from trainer.safe_io.folders import try_folder
from trainer.sysinfo.memory import named_values
from trainer.sysinfo.nvml import gpu_handle, pci_address
from trainer.sysinfo.topology import ROOT, closest_adapters, cpus_next_to, numa_node
from trainer.text.wording import in_gb, runs_text

_RDMA_DEVICES, _OPEN_FILES = Path("/sys/class/infiniband"), Path("/proc/self/fd")
_STATUS = Path("/proc/self/status")
_IPC_LOCK = 14  # capability that lifts the limit of locked memory (linux/capability.h)
_OPENED = "/dev/infiniband/uverbs"
_FAST_ETHERNET_GB = 100.0  # slower RoCE adapters mostly serve nodes as plain Ethernet

# Bits of NVML's nvmlClocksEventReason* that mean that something is wrong; idle and application clocks are
# normal.
_SLOWED = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def free_bytes(folder: Path) -> int | None:
    """Returns the free bytes of the file system that holds the folder; None if there is none."""
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return None


def disk_bytes(folder: Path) -> int | None:
    """Returns the free bytes of the file system that holds the folder, or would hold it."""
    return next((free_bytes(path) for path in (folder, *folder.parents) if path.exists()), None)


def try_place(job: Job, folder: Path) -> list[str]:
    """Tries what the job's run needs of the place of its folder, and leaves nothing behind.

    Returns a sentence for each thing that is missing and that a run can do without. Raises InputError if no
    run can begin there. A checkpoint of unknown size always fits.
    """
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    check_writable_folder(folder if place == folder else folder.parent)
    try:
        missing, free = try_folder(place), shutil.disk_usage(place).free
    except OSError as error:
        raise InputError(not_written(folder, error)) from None
    size, count = checkpoint_bytes(job), 1 if step_folders(folder / CHECKPOINTS) else 2
    if size is not None and (needed := count * size.total) > free:
        raise InputError(
            f"the run folder {folder} has no room for a checkpoint beside the last one: each takes "
            f"{in_gb(size.total)}, and {place} has {in_gb(free)} free. Make room for {in_gb(needed - free)} "
            "more, or set logging.runs to a folder on a larger disk."
        )
    return [f"{place}: its file system cannot {what}" for what in missing]


def open_files() -> int:
    """Returns this process's soft limit of open files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def locked_bytes(status: Path = _STATUS) -> int | None:
    """Returns how many bytes this process may lock in memory, as RDMA does; None if there is no limit.

    `status` is a file of the kernel's.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if int(named_values(status).get("CapEff", "0"), 16) >> _IPC_LOCK & 1:
        return None
    return None if limit == resource.RLIM_INFINITY else limit


def rdma(env: Mapping[str, str], devices: Path = _RDMA_DEVICES, files: Path = _OPEN_FILES) -> Rdma | None:
    """Returns the node's active RDMA devices, and whether this process has one open.

    Returns None if the node has none. Call it once NCCL has set up its connections. `devices` and `files` are
    folders of the kernel's.
    """
    active = sorted(_active(devices))
    if not active:
        return None
    return Rdma(tuple(active), any(target.startswith(_OPENED) for target in _targets(files)), _refusal(env))


def _active(devices: Path) -> Iterator[str]:
    """Yields name and speed of each device with an active port.

    Source: Linux, Documentation/ABI/stable/sysfs-class-infiniband.
    """
    for device in devices.glob("*"):
        speeds = [speed for port in device.glob("ports/*") if (speed := _speed_gb(port))]
        if speeds:
            yield f"{device.name} {max(speeds):g} Gb/s"


def _speed_gb(port: Path) -> float | None:
    """Returns gigabits per second; None for a port that is down or is an ordinary network adapter's."""
    with suppress(OSError, ValueError, IndexError):
        up = "ACTIVE" in (port / "state").read_text()
        speed = float((port / "rate").read_text().split()[0])
        ethernet = (port / "link_layer").read_text().strip() == "Ethernet"
        return speed if up and not (ethernet and speed < _FAST_ETHERNET_GB) else None
    return None


def _targets(files: Path) -> Iterator[str]:
    for file in files.glob("*"):
        with suppress(OSError):  # it was closed meanwhile
            yield os.readlink(file)


def _refusal(env: Mapping[str, str]) -> str:
    if env.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return f"NCCL_IB_DISABLE={env['NCCL_IB_DISABLE']}"
    return f"NCCL_NET={env['NCCL_NET']}" if env.get("NCCL_NET", "").lower() == "socket" else ""


def gpu(uuid: object) -> Gpu | None:
    """Returns the state of the GPU with this UUID; None if NVML cannot say."""
    import pynvml

    handle = gpu_handle(uuid)
    with suppress(pynvml.NVMLError):
        return _state(pynvml, handle) if handle is not None else None
    return None


def placement(uuid: object, root: Path = ROOT) -> Placement | None:
    """Returns where the GPU with this UUID and this process's CPUs are; None if NVML cannot tell."""
    address = pci_address(uuid)
    if address is None:
        return None
    mine, near = os.sched_getaffinity(0), cpus_next_to(address, root)
    adapters = closest_adapters(address, root)
    return Placement(
        gpu=address,
        numa_node=numa_node(address, root),
        cpus=runs_text(mine),
        near=bool(near) and mine <= near,
        apart=bool(near) and not mine & near,
        adapters=tuple(adapter.name for adapter in adapters),
        closeness=adapters[0].closeness if adapters else "",
    )


def _state(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    slowed = _query(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle), 0)
    errors = _query(
        nvml,
        lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        0,
    )
    processes = _query(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), [])
    name = nvml.nvmlDeviceGetName(handle)
    return Gpu(
        name=name.decode() if isinstance(name, bytes) else str(name),
        free_bytes=int(memory.free),
        total_bytes=int(memory.total),
        uncorrected_errors=int(errors),
        slowed_by=tuple(reason for bit, reason in _SLOWED.items() if slowed & bit),
        other_processes=sum(process.pid != os.getpid() for process in processes),
    )


def _query(nvml: Any, question: Callable[[], Any], otherwise: Any) -> Any:
    """Returns NVML's answer, or `otherwise`, since not every GPU has every counter."""
    try:
        return question()
    except nvml.NVMLError:
        return otherwise
