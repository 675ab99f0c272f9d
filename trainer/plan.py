"""How a global batch is cut for a world: pure arithmetic on the job, no torch. Shared by `check` and the trainer."""

from dataclasses import dataclass

from trainer.errors import InputError
from trainer.job import Job


@dataclass(frozen=True)
class Plan:
    """What one optimizer step is made of. Sizes in samples."""

    world_size: int
    global_batch_size: int
    batch_size_per_rank: int
    micro_batch_size: int
    accumulation: int


def plan(job: Job, world_size: int) -> Plan:
    """Cut the job's global batch for `world_size` ranks: equal shares, the fewest equal micro-batches that fit.

    Raises InputError where the ranks cannot have equal shares, naming the sizes that fit, or where a setting forbids to accumulate.
    """
    total = job.optim.global_batch_size
    if total % world_size:
        below = total - total % world_size
        fits = " or ".join(str(size) for size in (below, below + world_size) if size)
        raise InputError(
            f"optim.global_batch_size = {total} cannot be shared equally by {world_size} ranks: use {fits}, "
            f"or one of these numbers of ranks: {_divisors_near(total, world_size)}"
        )
    per_rank = total // world_size
    accumulation = _accumulation(per_rank, job.optim.max_batch_size_per_gpu or per_rank)
    if accumulation > 1 and job.comm.backend == "torch" and job.comm.torch.static_graph:
        raise InputError(
            f"comm.torch.static_graph = true wants a reduction after every pass, and {world_size} ranks accumulate {accumulation} passes "
            "a step: leave static_graph out, or use a larger optim.max_batch_size_per_gpu"
        )
    return Plan(world_size, total, per_rank, per_rank // accumulation, accumulation)


def _accumulation(per_rank: int, limit: int) -> int:
    """The smallest number of equal micro-batches of at most `limit` samples."""
    return next(k for k in range(-(-per_rank // limit), per_rank + 1) if per_rank % k == 0)


def _divisors_near(total: int, wanted: int) -> str:
    divisors = [k for k in range(1, min(total, 4 * wanted) + 1) if total % k == 0]
    return ", ".join(str(k) for k in sorted(sorted(divisors, key=lambda k: abs(k - wanted))[:4]))


@dataclass(frozen=True)
class Schedule:
    """How long the run is, in optimizer steps."""

    epoch_steps: int
    steps: int


def schedule(job: Job, samples: int) -> Schedule:
    """The run's length on so many samples; the tail of an epoch that fills no global batch is left out.

    Raises InputError where an epoch has no step at all.
    """
    epoch_steps = samples // job.optim.global_batch_size
    if not epoch_steps:
        raise InputError(
            f"{samples} samples are fewer than optim.global_batch_size = {job.optim.global_batch_size}: "
            "give more data, or a smaller global batch"
        )
    return Schedule(epoch_steps, job.optim.steps or (job.optim.epochs or 0) * epoch_steps)
