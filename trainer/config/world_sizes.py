"""Numbers of ranks with which a job can go on after the loss of nodes. Pure arithmetic; imports no torch."""

from collections.abc import Sequence

from trainer.config.batch_plan import plan
from trainer.config.job import Job
from trainer.config.stages import stage_title, stages_of
from trainer.errors import InputError, raise_problems
from trainer.text.wording import many


def world_sizes(job: Job) -> list[int]:
    """Returns all numbers of ranks that can train each stage of the job, smallest first."""
    total, stages = job.optim.global_batch_size, stages_of(job)
    divisors = {d for k in range(1, int(total**0.5) + 1) if total % k == 0 for d in (k, total // k)}
    return [size for size in sorted(divisors) if not _problem(stages, size)]


def needs_even_nodes(job: Job) -> bool:
    """Returns whether the ranks of a job must be as many on each node, as each holds a copy of the model."""
    return job.comm.backend == "fsdp" and job.comm.fsdp.shard_degree == "node"


def check_batches(job: Job, size: int) -> None:
    """Raises InputError that lists the stages whose batch so many ranks cannot share."""
    problems = []
    for number, own in enumerate(stages_of(job), 1):
        try:
            plan(own, size)
        except InputError as problem:
            problems.append(str(problem) if number == 1 else f"{stage_title(job, number)}: {problem}")
    raise_problems(problems)


def check_nodes(job: Job) -> None:
    """Raises InputError if `recovery.min_nodes` exceeds the job's nodes or its ranks cannot train the job."""
    fewest, nodes, per_node = job.recovery.min_nodes, job.resources.nodes, job.resources.ranks_per_node
    if fewest is None:
        return
    if fewest > nodes:
        raise InputError(
            f"recovery.min_nodes = {fewest} is above resources.nodes = {nodes}: use at most {nodes}"
        )
    stages = stages_of(job)
    if problem := _problem(stages, fewest * per_node):
        possible = [str(n) for n in range(1, nodes + 1) if not _problem(stages, n * per_node)]
        raise InputError(
            f"recovery.min_nodes = {fewest}: {many(fewest * per_node, 'rank')} {problem}: "
            + (f"use {' or '.join(possible[-4:])}" if possible else "no number of nodes can")
        )


def _problem(stages: Sequence[Job], size: int) -> str:
    """Returns why so many ranks cannot train the stages, as the end of a sentence; "" if they can."""
    for number, job in enumerate(stages, 1):
        total, degree = job.optim.global_batch_size, job.comm.fsdp.shard_degree
        if total % size:
            of_stage = f" of stage {number}" if number > 1 else ""
            return f"cannot share optim.global_batch_size = {total}{of_stage} equally"
        try:
            plan(job, size)
        except InputError as problem:
            return f"cannot train ({problem})"
        if job.comm.backend == "fsdp" and isinstance(degree, int) and size > 1 and size % degree:
            return f"cannot be cut into groups of comm.fsdp.shard_degree = {degree}"
    return ""
