"""Numbers of ranks with which a job can go on after the loss of nodes. Pure arithmetic; imports no torch."""

from trainer.config.batch_plan import plan
from trainer.config.job import Job
from trainer.errors import InputError
from trainer.text.wording import many


def world_sizes(job: Job) -> list[int]:
    """Returns all numbers of ranks that can share the job's global batch equally, smallest first."""
    total = job.optim.global_batch_size
    divisors = {d for k in range(1, int(total**0.5) + 1) if total % k == 0 for d in (k, total // k)}
    return [size for size in sorted(divisors) if _is_possible(job, size)]


def check_nodes(job: Job) -> None:
    """Raises InputError if `recovery.min_nodes` exceeds the job's nodes or its ranks cannot share a batch."""
    fewest, nodes, per_node = job.recovery.min_nodes, job.resources.nodes, job.resources.ranks_per_node
    if fewest is None:
        return
    if fewest > nodes:
        raise InputError(
            f"recovery.min_nodes = {fewest} is above resources.nodes = {nodes}: use at most {nodes}"
        )
    if not _is_possible(job, fewest * per_node):
        possible = [str(n) for n in range(1, nodes + 1) if _is_possible(job, n * per_node)]
        raise InputError(
            f"recovery.min_nodes = {fewest}: {many(fewest * per_node, 'rank')} cannot share "
            f"optim.global_batch_size = {job.optim.global_batch_size} equally: "
            + (f"use {' or '.join(possible[-4:])}" if possible else "use another global batch")
        )


def _is_possible(job: Job, size: int) -> bool:
    try:
        plan(job, size)
    except InputError:
        return False
    return True
