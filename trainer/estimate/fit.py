"""Decides how many samples fit a GPU in one forward pass, and what to change if none does.

Pure arithmetic on `step_memory`; imports no torch.
"""

from collections.abc import Iterator
from typing import Any

from trainer.comm.backends import BACKENDS
from trainer.comm.shard_degree import planned_degree
from trainer.config import Job
from trainer.config.batch_plan import BatchPlan, plan
from trainer.config.gpus import GIB
from trainer.errors import InputError
from trainer.estimate.architecture import Architecture, planned_architecture
from trainer.estimate.drawn_steps import drawn_steps
from trainer.estimate.step_memory import StepMemory, step_memory
from trainer.model.catalog import known_models

_USABLE = 0.9
"""Share of a GPU's memory that a plan uses: the rest is for fragments, NCCL, and errors of the arithmetic."""
_CONTEXT = GIB // 2
"""Bytes of a CUDA context."""
_MOST_SAMPLES = 2**20


def usable_bytes(gpu_bytes: int) -> int:
    """Returns how much of a GPU's memory a plan uses."""
    return int(_USABLE * gpu_bytes) - _CONTEXT


def memory_of(shape: Architecture, job: Job, batch_plan: BatchPlan) -> StepMemory:
    """Returns the memory of a rank's step with the job's backend, of several kinds that which takes most."""
    shards = _shards(job, batch_plan.world_size)
    steps = (
        step_memory(drawn, job, parts, shards) for _, drawn, parts in drawn_steps(shape, job, batch_plan)
    )
    return max(steps, key=lambda memory: memory.total)


def _shards(job: Job, world_size: int) -> int:
    """Returns the number of ranks that together hold the model once."""
    if not _splits(job.comm.backend):
        return 1
    return planned_degree(job.comm.fsdp.shard_degree, world_size, job.resources.ranks_per_node)


def _splits(backend: str) -> bool:
    """Returns whether the ranks of a backend hold parts of the model, and not all of it."""
    return BACKENDS[backend].splits_model


def fits(shape: Architecture, job: Job, batch_plan: BatchPlan, gpu_bytes: int) -> bool:
    """Returns whether the plan's step fits a GPU with that many bytes."""
    return memory_of(shape, job, batch_plan).total <= usable_bytes(gpu_bytes)


def largest_micro_batch(shape: Architecture, job: Job, world_size: int, gpu_bytes: int) -> int:
    """Returns the most samples of one forward pass that fit; 0 if not even one does.

    A rank's whole share is tried first, then larger shares of a larger global batch, or smaller parts of it.
    """
    share = job.optim.global_batch_size // world_size

    def fit(samples: int) -> bool:
        parts = -(-share // samples)
        per_rank = share if parts > 1 else samples
        batch_plan = BatchPlan(world_size, world_size * per_rank, per_rank, samples, parts)
        optim = job.optim.model_copy(update={"max_batch_size_per_gpu": samples})
        return fits(shape, job.model_copy(update={"optim": optim}), batch_plan, gpu_bytes)

    low, high = (share, _MOST_SAMPLES) if share and fit(share) else (0, share)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low


def with_micro_batch(job: Job, world_size: int, gpu_bytes: int | None) -> Job:
    """Returns the job with a number in place of `max_batch_size_per_gpu = "auto"`; other jobs unchanged.

    `gpu_bytes` are those of the smallest GPU; on CPUs (None) nothing is limited. Raises InputError if the
    model's config does not say its size, or if not even one sample fits.
    """
    if job.optim.max_batch_size_per_gpu != "auto":
        return job
    limit = None
    if gpu_bytes is not None:
        shape = known_shape(job)
        limit = largest_micro_batch(shape, job, world_size, gpu_bytes)
        if not limit:
            raise InputError(
                f'optim.max_batch_size_per_gpu = "auto": not even one sample of {job.model.name} fits a GPU '
                f"of {gpu_bytes / GIB:.1f} GiB: {advice(shape, job, world_size, gpu_bytes)}"
            )
    optim = job.optim.model_copy(update={"max_batch_size_per_gpu": limit})
    return job.model_copy(update={"optim": optim})


def known_shape(job: Job) -> Architecture:
    """Returns the sizes of the job's model; raises InputError if "auto" needs them and nothing knows them."""
    if shape := planned_architecture(job.model):
        return shape
    why = (
        f"the memory of the teacher, {job.model.teacher}, is not estimated"
        if job.model.teacher is not None
        else f"the config of {job.model.name} does not say how much memory it takes (open_clip's own "
        "transformers and SigLIP's do)"
    )
    raise InputError(f'optim.max_batch_size_per_gpu = "auto": {why}: give a number')


def advice(shape: Architecture, job: Job, world_size: int, gpu_bytes: int) -> str:
    """Returns what to change so that a job fits, as a clause; the first remedies cost least."""
    remedies = [
        text.format(batch=batch)
        for text, changed in _remedies(job)
        if (batch := largest_micro_batch(shape, changed, world_size, gpu_bytes))
    ]
    if not remedies:
        return "use a GPU with more memory, a smaller optim.global_batch_size or a smaller model"
    return "set " + ", or ".join(remedies)


def _remedies(job: Job) -> Iterator[tuple[str, Job]]:
    """Yields changes that save memory, with the changed job: one at a time, then all of them together.

    `{batch}` in a text stands for the samples that then fit in one forward pass.
    """
    then = "(then up to {batch} samples fit in one forward pass)"
    changes: list[tuple[str, str, dict[str, Any]]] = []
    if job.model.precision in ("fp32", "tf32", "fp64"):
        changes.append(("model", 'model.precision = "bf16"', {"precision": "bf16"}))
    if not job.model.grad_checkpointing:
        changes.append(("model", "model.grad_checkpointing = true", {"grad_checkpointing": True}))
    splitting = [name for name in BACKENDS if _splits(name)]
    if splitting and not _splits(job.comm.backend):
        changes.append(("comm", f'comm.backend = "{splitting[0]}"', {"backend": splitting[0]}))
    yield "optim.max_batch_size_per_gpu = {batch}, which accumulates", job
    for change in changes:
        yield f"{change[1]} {then}", _with(job, change)
    if len(changes) > 1:
        together = job
        for change in changes:
            together = _with(together, change)
        yield f"{' and '.join(change[1] for change in changes)} {then}", together


def _with(job: Job, change: tuple[str, str, dict[str, Any]]) -> Job:
    section, _, keys = change
    return job.model_copy(update={section: getattr(job, section).model_copy(update=keys)})


def with_gpu_limit(job: Job, world_size: int) -> Job:
    """Returns the job with a number in place of "auto" if the job names its GPU; else unchanged.

    Without open_clip here (on a login node) the ranks decide.
    """
    gpu = job.resources.known_gpu
    if gpu is None or job.resources.on_cpu or not known_models():
        return job
    return with_micro_batch(job, world_size, gpu.memory)


def check_micro_batch(job: Job, world_size: int) -> None:
    """Raises InputError if "auto" cannot be decided for this job, or if its result cannot be planned."""
    if job.optim.max_batch_size_per_gpu == "auto" and not job.resources.on_cpu and known_models():
        known_shape(job)
        plan(with_gpu_limit(job, world_size), world_size)
