"""NVIDIA's management library (NVML), which knows a GPU's state from outside the process.

Imports no torch, and loads the driver's library only when it is asked.
"""

from collections.abc import Iterator, Mapping
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


def visible_gpus(env: Mapping[str, str]) -> list[str]:
    """Returns the PCI addresses of the GPUs that CUDA will show this process, in CUDA's order, from 0 on.

    Empty if there are none or if it is not known: CUDA puts the fastest of several kinds first, unless
    CUDA_DEVICE_ORDER = PCI_BUS_ID, and parts of a GPU (MIG) have no address of their own.
    """
    try:
        import pynvml
    except ModuleNotFoundError:  # an installation for a login node
        return []
    try:
        pynvml.nvmlInit()
        return [_pci_address(pynvml.nvmlDeviceGetPciInfo(handle).busId) for handle in _visible(pynvml, env)]
    except (pynvml.NVMLError, LookupError):
        return []


def pci_address(uuid: object) -> str | None:
    """Returns the PCI address of the GPU with this UUID, as /sys writes it; None if NVML cannot tell."""
    import pynvml

    handle = gpu_handle(uuid)
    with suppress(pynvml.NVMLError):
        return None if handle is None else _pci_address(pynvml.nvmlDeviceGetPciInfo(handle).busId)
    return None


def counted_mj(handle: Any) -> int:
    """Returns the millijoules that the GPU has taken since its driver was loaded; 0 if it counts none."""
    import pynvml

    with suppress(pynvml.NVMLError):
        return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
    return 0


def use_of(handle: Any) -> tuple[float, float]:
    """Returns the share of time in which the GPU was busy, and its bytes in use; zeros if NVML cannot say."""
    import pynvml

    with suppress(pynvml.NVMLError):
        used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
        return pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, float(used)
    return 0.0, 0.0


def _visible(nvml: Any, env: Mapping[str, str]) -> Iterator[Any]:
    """Yields the handles of visible GPUs. Raises LookupError if their order is not known."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    kinds = {nvml.nvmlDeviceGetName(handle) for handle in handles}
    in_order = len(kinds) <= 1 or env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    for entry in env.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(handles))))).split(","):
        name = entry.strip()
        if name.startswith("GPU-"):
            yield nvml.nvmlDeviceGetHandleByUUID(name.encode())
        elif not name.isdecimal() or int(name) >= len(handles):
            if name.startswith("MIG-"):
                raise LookupError(name)
            return  # CUDA ignores the rest of the list
        elif not in_order:
            raise LookupError(name)
        else:
            yield handles[int(name)]


def _pci_address(bus_id: bytes | str) -> str:
    """Returns NVML's address, "00000000:1A:00.0", as /sys writes it: "0000:1a:00.0"."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"
