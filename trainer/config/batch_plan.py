"""Divides a global batch among a world's ranks and counts the run's steps; `check` and the trainer share it.

Pure arithmetic on the job; imports no torch.
"""

from dataclasses import dataclass

from trainer.config.job import Job
from trainer.errors import InputError
from trainer.text.wording import many


@dataclass(frozen=True)
class BatchPlan:
    """Parts of one optimizer step; sizes are in samples."""

    world_size: int
    global_batch_size: int
    batch_size_per_rank: int
    micro_batch_size: int
    accumulation: int


def plan(job: Job, world_size: int) -> BatchPlan:
    """Divides the global batch equally among ranks, each share in the fewest equal micro-batches that fit.

    "auto" sets no limit here: `trainer.estimate.fit` puts a number in its place first. Raises InputError if
    the ranks cannot have equal shares, naming sizes that fit, or if accumulation is needed and
    comm.torch.static_graph or model.cuda_graphs forbids it.
    """
    total = job.optim.global_batch_size
    if total % world_size:
        below = total - total % world_size
        fits = " or ".join(str(size) for size in (below, below + world_size) if size)
        raise InputError(
            f"optim.global_batch_size = {total} cannot be shared equally by {many(world_size, 'rank')}: use "
            f"{fits}, or one of these numbers of ranks: {_divisors_near(total, world_size)}"
        )
    per_rank = total // world_size
    accumulation = _accumulation(per_rank, _limit(job) or per_rank)
    if accumulation > 1 and job.comm.backend == "torch" and job.comm.torch.static_graph:
        raise InputError(
            "comm.torch.static_graph = true needs a reduction after every pass, but with "
            f"{many(world_size, 'rank')} each step has {accumulation} passes: leave static_graph out, or use "
            "a larger optim.max_batch_size_per_gpu"
        )
    if accumulation > 1 and job.model.cuda_graphs:
        raise InputError(
            f"model.cuda_graphs = true needs steps of one micro-batch, but with {many(world_size, 'rank')} "
            f"each step has {accumulation}: leave cuda_graphs out, or use a larger "
            "optim.max_batch_size_per_gpu"
        )
    return BatchPlan(world_size, total, per_rank, per_rank // accumulation, accumulation)


def batch_text(job: Job, batch_plan: BatchPlan) -> str:
    """Returns how the global batch is divided, and why, for people.

    For example `256 = 1 rank x 1 micro-batch x 256 samples (no max_batch_size_per_gpu: no accumulation)`.
    """
    limit = _limit(job)
    tokens = job.optim.max_image_tokens_per_gpu
    reason = f"max_batch_size_per_gpu = {limit}" if limit else "no max_batch_size_per_gpu: no accumulation"
    if limit and tokens and limit == tokens // max(job.model.token_budgets):
        reason = f"max_image_tokens_per_gpu = {tokens:,}"
    if job.optim.max_batch_size_per_gpu == "auto":
        reason = 'max_batch_size_per_gpu = "auto": the ranks choose by the memory of their GPUs'
    return (
        f"{batch_plan.global_batch_size:,} = {many(batch_plan.world_size, 'rank')} "
        f"x {many(batch_plan.accumulation, 'micro-batch', 'micro-batches')} "
        f"x {many(batch_plan.micro_batch_size, 'sample')} ({reason})"
    )


def passes(job: Job, batch_plan: BatchPlan, image_tokens: int) -> int:
    """Returns the equal micro-batches of a step whose images have at most so many patches.

    The plan's number is for images with the most of all steps; another divides it.
    """
    share, most = batch_plan.batch_size_per_rank, batch_plan.accumulation
    if job.optim.max_image_tokens_per_gpu is None:
        return most
    limit = _limit(job, image_tokens) or share
    return next((k for k in range(1, most) if most % k == 0 and share <= k * limit), most)


def _limit(job: Job, image_tokens: int | None = None) -> int | None:
    """Returns the most samples of a pass whose images have so many patches; None: the most of all steps."""
    given, tokens = job.optim.max_batch_size_per_gpu, job.optim.max_image_tokens_per_gpu
    limits = [given] if isinstance(given, int) else []
    if tokens is not None:
        limits.append(tokens // (image_tokens or max(job.model.token_budgets)))
    return min(limits, default=None)


def _accumulation(per_rank: int, limit: int) -> int:
    """Returns the smallest number of equal micro-batches that have at most `limit` samples each."""
    return next(k for k in range(-(-per_rank // limit), per_rank + 1) if per_rank % k == 0)


def _divisors_near(total: int, wanted: int) -> str:
    divisors = [k for k in range(1, min(total, 4 * wanted) + 1) if total % k == 0]
    return ", ".join(str(k) for k in sorted(sorted(divisors, key=lambda k: abs(k - wanted))[:4]))


@dataclass(frozen=True)
class Schedule:
    """Length of a run's stage, of which most have one, and of an epoch in it, in optimizer steps."""

    epoch_steps: int
    steps: int
    """Last step of the stage, counted from the run's begin."""
    begin: int = 0
    """Steps of the stages before."""
    samples_before: int = 0
    """Samples of the stages before."""
    last: int = 0
    """Last step of the run."""

    def own(self, step: int) -> int:
        """Returns the number of a step of the run within its stage."""
        return step - self.begin

    @property
    def own_steps(self) -> int:
        """Number of the stage's own steps."""
        return self.own(self.steps)

    @property
    def ends_run(self) -> bool:
        """True for the last stage of the run, or the only one."""
        return self.steps == self.last


def steps_per_epoch(samples: int, global_batch_size: int) -> int:
    """Returns the number of whole global batches in an epoch; the samples that fill none are left out."""
    return samples // global_batch_size


def schedule(job: Job, samples: int) -> Schedule:
    """Returns the length of a job without stages for that many samples per epoch.

    The samples at an epoch's end that fill no global batch are left out. Raises InputError if an epoch has no
    step at all.
    """
    epoch_steps = steps_per_epoch(samples, job.optim.global_batch_size)
    if not epoch_steps:
        raise InputError(
            f"the data has {many(samples, 'sample')}, fewer than optim.global_batch_size = "
            f"{job.optim.global_batch_size}: give more data, or a smaller global batch"
        )
    steps = job.optim.steps or (job.optim.epochs or 0) * epoch_steps
    return Schedule(epoch_steps, steps, last=steps)
