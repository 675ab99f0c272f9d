"""Text of `clipship check` about the device that ranks compute on, and about a GPU's memory and time.

Estimates are arithmetic on the model. Imports no torch.
"""

import os
from collections.abc import Iterator
from dataclasses import asdict, replace

from trainer.config import Job
from trainer.config.batch_plan import BatchPlan
from trainer.config.fabric_rates import FabricRate, rates_between
from trainer.config.gpus import GIB, Gpu
from trainer.estimate.architecture import Architecture, planned_architecture
from trainer.estimate.fit import advice, fits, largest_micro_batch, memory_of
from trainer.estimate.scaling import Scaling, scaled_step
from trainer.estimate.step_speed import step_speed
from trainer.model.catalog import known_models
from trainer.model.text_size import text_parameters, text_tower
from trainer.report.wording import percent, span
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


_HOUR_S = 3600.0
_PAGE = "docs/performance.md"
_MORE_NODES = (2, 4, 8)
"""Multiples of a job's nodes for which its speed is estimated."""
_LEAST_GIB = 0.05
"""Parts of the memory below this are left out of the list."""


def gpu_rows(job: Job, batch_plan: BatchPlan, steps: int | None) -> Iterator[tuple[str, str]]:
    """Yields the rows about memory and speed of a job on GPUs.

    For a model whose size is not known, one row says so. `batch_plan` is that of the job with a number in
    place of "auto". Without `resources.gpu` there is the memory alone. `steps` is the length of the run, None
    if it is not known.
    """
    shape = planned_architecture(job.model)
    if shape is None:
        if job.model.teacher is not None:
            yield "memory", f"not known: that of the teacher, {job.model.teacher}, is not estimated ({_PAGE})"
        elif known_models():  # without open_clip, on a login node, no model has a size
            tower = text_tower(job.model)
            silent = f"not known: the config of {job.model.name} does not say its size ({_PAGE})"
            yield "memory", _beside_activations(job, tower) if tower else silent
        return
    gpu = job.resources.known_gpu
    memory = memory_of(shape, job, batch_plan)
    sizes = sorted(asdict(memory).items(), key=lambda pair: -pair[1])
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in sizes if size >= _LEAST_GIB * GIB)
    has = f" of {gpu.memory_gib:.1f} ({gpu.name})" if gpu else " on each GPU"
    yield "memory", f"about {memory.total / GIB:.1f} GiB{has}: {parts}"
    if gpu is None:
        yield "", "resources.gpu, such as H100, would say what fits and how long it takes, or gpu_rates"
        return
    most = largest_micro_batch(shape, job, batch_plan.world_size, gpu.memory)
    if most:
        yield "", f"up to {many(most, 'sample')} fit in one forward pass (optim.max_batch_size_per_gpu)"
    yield "estimate", _estimate(shape, job, batch_plan, gpu, steps)


def _beside_activations(job: Job, tower: str) -> str:
    """Returns what is known of the memory of a model with a text tower of Hugging Face."""
    count = text_parameters(job.model)
    if count is None:
        return f"not known: the size of the text tower {tower} is not at hand ({_PAGE})"
    values = 2 * count + job.optim.step_values(count)  # the parameters and their gradients
    return (
        f"not known: what the activations of the text tower {tower} take is not estimated; its "
        f"{count / 1e6:,.1f} M parameters, trained, take about {values * 4 / GIB:.1f} GiB ({_PAGE})"
    )


def _estimate(shape: Architecture, job: Job, batch_plan: BatchPlan, gpu: Gpu, steps: int | None) -> str:
    speed, gpus = step_speed(shape, job, batch_plan, gpu), batch_plan.world_size
    text = f"at most {speed.samples_s * gpus:,.0f} samples/s on {many(gpus, gpu.name)} (MFU {speed.mfu:.2f})"
    if steps is not None:
        hours = speed.hours(steps * batch_plan.global_batch_size, gpus)
        text += f", {_time(hours)}, {_count(hours * gpus)} GPU-hours at least"
    return f"{text}; from the GPU's peak rates, not measured ({_PAGE})"


def scaling_of(job: Job, batch_plan: BatchPlan, times: int = 1) -> Scaling | None:
    """Returns the step on all GPUs of a plan, or on so many times as many with the same samples on each.

    None: there is one GPU, or the size of the model or the rates of the GPU are not known.
    """
    shape, gpu = planned_architecture(job.model), job.resources.known_gpu
    if shape is None or gpu is None or batch_plan.world_size == 1:
        return None
    world, samples = times * batch_plan.world_size, times * batch_plan.global_batch_size
    larger = replace(batch_plan, world_size=world, global_batch_size=samples)
    return scaled_step(shape, job, larger, gpu, _network(job))


def _network(job: Job) -> FabricRate:
    return rates_between(job.resources.fabric, job.resources.gpu)


def scaling_rows(job: Job, batch_plan: BatchPlan) -> Iterator[tuple[str, str]]:
    """Yields the rows about what GPUs lose by waiting for each other: on the job's nodes, and on more."""
    steps = [step for times in (1, *_MORE_NODES) if (step := scaling_of(job, batch_plan, times))]
    if not steps:
        return
    found, *larger = steps
    takes = f"a step takes about {span(found.step_s)}, of which {span(found.exposed_s)} go into waiting"
    yield "scaling", f"{takes} and {span(found.loss_s)} into the loss; assumed: {_network(job).source}"
    kept = [
        f"{percent(step.efficiency)} on {many(times * job.resources.nodes, 'node')}"
        for times, step in zip(_MORE_NODES, larger, strict=True)
    ]
    own = f"each GPU keeps {percent(found.efficiency)} of its speed alone"
    yield "", f"{own}, and with as many samples on each {', '.join(kept)}; not measured ({_PAGE})"


def _count(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 1 else f"{hours:.2g}"


def _time(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else span(_HOUR_S * hours)


def too_large(job: Job, batch_plan: BatchPlan) -> Iterator[str]:
    """Yields a sentence if the step does not fit the GPU that the job names."""
    shape, gpu = planned_architecture(job.model), job.resources.known_gpu
    if shape is None or gpu is None or fits(shape, job, batch_plan, gpu.memory):
        return
    needed = memory_of(shape, job, batch_plan).total / GIB
    yield (
        f"a step of {many(batch_plan.micro_batch_size, 'sample')} takes about {needed:.1f} GiB, too much for "
        f"{gpu.name} with {gpu.memory_gib:.1f} GiB: {advice(shape, job, batch_plan.world_size, gpu.memory)}"
    )
