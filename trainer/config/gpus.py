"""Table of GPUs: memory and peak rates, for estimates before a run starts.

Pure; imports no torch. Rates are those of NVIDIA's data sheets, without sparsity; docs/performance.md names
them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory_gib: float
    """GiB that CUDA gives to programs; some of what the data sheet names is kept for error correction."""
    tflops: dict[str, float]
    """Peak of matrix products in 10^12 operations a second, by `model.precision`."""
    bandwidth_gb_s: float
    """Peak of the memory's bandwidth in 10^9 bytes a second."""
    source: str
    """Document that has the rates."""

    @property
    def memory(self) -> int:
        """Bytes that CUDA gives to programs."""
        return int(self.memory_gib * GIB)


def _gpu(
    name: str,
    memory_gib: float,
    half: float,
    tf32: float,
    fp32: float,
    fp64: float,
    bandwidth_gb_s: float,
    source: str,
) -> Gpu:
    rates = {"bf16": half, "fp16": half, "tf32": tf32, "fp32": fp32, "fp64": fp64}
    return Gpu(name, memory_gib, rates, bandwidth_gb_s, source)


_ROWS = (
    _gpu("A100-40GB", 39.4, 312, 156, 19.5, 19.5, 1555, "NVIDIA A100 Tensor Core GPU data sheet, SXM"),
    _gpu("A100-80GB", 79.1, 312, 156, 19.5, 19.5, 2039, "NVIDIA A100 Tensor Core GPU data sheet, SXM"),
    _gpu("A800-80GB", 79.1, 312, 156, 19.5, 19.5, 2039, "NVIDIA A800 Tensor Core GPU data sheet, SXM"),
    _gpu("H100", 79.1, 989, 494, 67, 67, 3350, "NVIDIA H100 Tensor Core GPU data sheet, SXM"),
    _gpu("H800", 79.1, 989, 494, 67, 1, 3350, "NVIDIA H800 Tensor Core GPU data sheet, SXM"),
    _gpu("H200", 139.8, 989, 494, 67, 67, 4800, "NVIDIA H200 Tensor Core GPU data sheet, SXM"),
    _gpu("H20", 95.0, 148, 74, 44, 1, 4000, "NVIDIA H20 data sheet, 96 GB"),
    _gpu("B200", 178.0, 2250, 1125, 75, 37, 7700, "NVIDIA HGX B200 data sheet"),
    _gpu("GB200", 184.0, 2500, 1250, 80, 40, 8000, "NVIDIA GB200 NVL72 data sheet, one GPU"),
    _gpu("B300", 267.0, 2250, 1125, 75, 1.25, 8000, "NVIDIA HGX B300 data sheet"),
    _gpu("L40S", 44.4, 362, 183, 91.6, 1.4, 864, "NVIDIA L40S data sheet"),
    _gpu("L20", 44.4, 119.5, 59.8, 59.8, 0.9, 864, "NVIDIA L20 data sheet"),
    _gpu("RTX-6000-Ada", 47.4, 364, 182, 91.1, 1.4, 960, "NVIDIA RTX 6000 Ada Generation data sheet"),
    _gpu("RTX-4090", 23.5, 165, 82.6, 82.6, 1.3, 1008, "NVIDIA Ada GPU architecture paper"),
    _gpu("RTX-5090", 31.3, 209.5, 104.8, 104.8, 1.6, 1792, "NVIDIA RTX Blackwell GPU architecture paper"),
)

GPUS: dict[str, Gpu] = {row.name: row for row in _ROWS}
"""Rows by the value of `resources.gpu`."""
if TYPE_CHECKING:
    GpuName = str
else:
    GpuName = Literal[tuple(GPUS)]

_OF_PEAK, _OF_BANDWIDTH = 0.79, 0.9
"""Shares of its data sheet's rates that an H100 reached in `clipship doctor` (docs/performance.md)."""


def gpu_named(name: str) -> Gpu | None:
    """Returns the row of a GPU by the name that its driver gives, such as `NVIDIA H100 80GB HBM3`, or None.

    A row's peak is that of the SXM form; other forms (PCIe, NVL) have no row.
    """
    words = set(name.upper().replace("-", " ").split())
    if words & {"PCIE", "NVL"}:
        return None
    return next((gpu for gpu in _ROWS if set(gpu.name.upper().split("-")) <= words), None)


def measured_gpu(memory_gib: float, tflops: float, bandwidth_gb_s: float) -> Gpu:
    """Returns a row for rates that were measured, in any precision: a data sheet would name higher ones."""
    peaks = dict.fromkeys(_ROWS[0].tflops, tflops / _OF_PEAK)
    return Gpu("own GPU", memory_gib, peaks, bandwidth_gb_s / _OF_BANDWIDTH, "resources.gpu_rates")
