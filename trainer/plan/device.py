"""Text of `clipship check` about the device that ranks compute on. Imports no torch."""

import os
from collections.abc import Iterator

from trainer.config import Job
from trainer.config.gpus import GIB, Gpu
from trainer.sysinfo.memory import host_bytes
from trainer.sysinfo.nvml import GpuHere
from trainer.text.wording import many


def device_rows(job: Job, *, local: bool) -> Iterator[tuple[str, str]]:
    """Yields what ranks compute on and why; then facts of this machine's GPUs, or of the GPU of the job."""
    cpu = f"the CPU, {_cpu_here()}" if local else "the CPU"
    if job.resources.on_cpu:
        key = 'device = "cpu"' if job.resources.device == "cpu" else "gpus_per_node = 0"
        yield "device", f"{cpu} (resources.{key})"
        return
    if job.asks_for_gpus:
        yield "device", f"a GPU for each rank; a rank without one ends the run ({job.asks_for_gpus})"
    elif local and not job.resources.row.here:
        yield "device", f"{cpu} (this machine has no GPU, and the job asks for none)"
    else:
        yield "device", "a GPU for each rank if torch can use one, else the CPU (the job asks for no GPU)"
    row = job.resources.row
    if local and row.here and row.monitor and (here := row.monitor.gpus_here()):
        yield "", f"here: {_gpus_text(here)}"
    if gpu := job.resources.known_gpu:
        yield "", f"{gpu.name}: {_peaks(gpu, job.model.precision)}"


def on_gpus(job: Job, *, local: bool) -> bool:
    """Returns whether it is known that the job's ranks compute on GPUs."""
    if job.resources.on_cpu:
        return False
    return bool(job.asks_for_gpus or job.resources.gpu) or (local and job.resources.row.here)


def no_gpu_here(job: Job, *, local: bool) -> Iterator[str]:
    """Yields a sentence if the job asks for a GPU that this machine does not have."""
    if local and job.asks_for_gpus and not job.resources.row.here:
        yield (
            f"{job.asks_for_gpus}, but this machine has no GPU, and a rank without one ends the run: "
            "--set resources.device=cpu trains on the CPU"
        )


def _cpu_here() -> str:
    return f"{many(len(os.sched_getaffinity(0)), 'core')} and {host_bytes() / GIB:.1f} GiB of memory"


def _gpus_text(gpus: list[GpuHere]) -> str:
    """Returns the GPUs, equal ones together, such as `2 x NVIDIA L40S of 44.4 GiB`."""
    kinds = dict.fromkeys((gpu.name, f"{gpu.memory / GIB:.1f}") for gpu in gpus)
    counts = {kind: sum((gpu.name, f"{gpu.memory / GIB:.1f}") == kind for gpu in gpus) for kind in kinds}
    return ", ".join(f"{count} x {name} of {gib} GiB" for (name, gib), count in counts.items())


def _peaks(gpu: Gpu, precision: str) -> str:
    return (
        f"{gpu.memory_gib:.1f} GiB, at most {gpu.tflops[precision]:,g} TFLOP/s in {precision} and "
        f"{gpu.bandwidth_gb_s:,g} GB/s"
    )
