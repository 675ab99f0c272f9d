"""Asks torch about the accelerator of a rank. Nothing else asks a device for its type.

A device is one of a row of `trainer.sysinfo.accelerators`. Two rows may share a type, as CUDA and ROCm do:
then the row counts for which torch is built.
"""

import importlib.util
from typing import Any

import torch

from trainer.sysinfo.accelerators import ACCELERATORS, CPU, CUDA, Accelerator


def accelerator_of(device: torch.device) -> Accelerator:
    """Returns the row of a device; that of the CPU for one without memory, such as meta."""
    rows = [row for row in ACCELERATORS.values() if row.device_type == device.type]
    return next(filter(built_for, rows), rows[0] if rows else CPU)


def on_accelerator(device: torch.device) -> bool:
    """Returns whether the device works beside the host, with streams and memory of its own."""
    return accelerator_of(device) is not CPU


def is_cuda(device: torch.device) -> bool:
    """Returns whether what is made for CUDA alone runs on the device."""
    return accelerator_of(device).runs_cuda


def pins_memory(device: torch.device) -> bool:
    """Returns whether memory of the host can be page-locked, so that copies to the device run beside."""
    return accelerator_of(device).pins_memory


def runtime(device: torch.device) -> Any:
    """Returns torch's module of the device, such as torch.cuda, which has its streams, events and memory."""
    return torch.get_device_module(device)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds the generators of the host and of the current device of this kind.

    `torch.manual_seed` seeds every kind of device, and formats this thread's stack for each one that no
    process uses: a millisecond of each step.
    """
    torch.default_generator.manual_seed(seed)
    if on_accelerator(device):
        runtime(device).manual_seed(seed)


def memory_bytes(device: torch.device) -> int:
    """Returns the bytes of an accelerator's memory."""
    return int(runtime(device).get_device_properties(device).total_memory)


def uuid_of(device: torch.device) -> str | None:
    """Returns the driver's name for this very device; None if there is none."""
    if not on_accelerator(device):
        return None
    uuid = getattr(runtime(device).get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


def built_for(row: Accelerator) -> bool:
    """Returns whether this torch knows the row's devices; whether there are any is not asked."""
    if row.torch_version is not None:
        return getattr(torch.version, row.torch_version, None) is not None
    return hasattr(torch, row.device_type)


def usable_devices(row: Accelerator) -> int:
    """Returns the number of devices that torch can use."""
    if not built_for(row):
        return 0
    module = runtime(torch.device(row.device_type))
    return int(module.device_count()) if module.is_available() else 0


def chosen(name: str | None) -> Accelerator:
    """Returns the row that a job names; else the first whose devices torch can use, or CUDA's.

    The plugin of one that is named is imported, unless it is missing.
    """
    if name is None:
        usable = (row for row in ACCELERATORS.values() if row is not CPU and usable_devices(row))
        return next(usable, CUDA)
    row = ACCELERATORS[name]
    if row.plugin is not None and importlib.util.find_spec(row.plugin):
        importlib.import_module(row.plugin)
    return row


def in_use() -> str:
    """Returns the name for people of an accelerator that this process has started; "" if there is none."""
    rows = (row for row in ACCELERATORS.values() if row is not CPU and built_for(row))
    return next((row.title for row in rows if runtime(torch.device(row.device_type)).is_initialized()), "")
