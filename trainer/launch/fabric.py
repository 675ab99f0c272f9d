"""Finds what follows from `resources.fabric` for the text that a scheduler gets.

Everything comes from the network's row in `trainer.config.fabrics`. Pure; imports no torch.
"""

from collections.abc import Iterator

from trainer.config import Job
from trainer.config.fabric_fit import fabric_of
from trainer.launch.rank_env import rank_environment


def cluster_environment(job: Job, world_size: int) -> dict[str, str]:
    """Returns the variables of every rank on a cluster; the job's own keys win over those of its network."""
    own = rank_environment(job, world_size)
    return {name: value for name, value in _variables(job).items() if name not in own} | own


def refusal(job: Job, scheduler: str) -> Iterator[str]:
    """Yields a sentence if the scheduler's text cannot have what the network needs."""
    row = fabric_of(job)
    if row and scheduler in row.refused:
        yield f'resources.fabric = "{row.name}" does not work with [{scheduler}]: {row.refused[scheduler]}'


def pins_memory(job: Job) -> bool:
    """Returns whether the ranks pin memory for RDMA, for which the system must not limit it."""
    row = fabric_of(job)
    return row is not None and row.rdma


def conflicts(job: Job) -> Iterator[str]:
    """Yields a sentence for each variable of the network that the job sets to another value."""
    row, own = fabric_of(job), rank_environment(job, job.resources.world_size)
    for line in row.variables if row else ():
        if own.get(line.name, line.value) != line.value:
            yield (
                f'resources.fabric = "{job.resources.fabric}" sets {line.name} = {line.value}, but the job '
                f"sets {own[line.name]}, which wins: {line.why}"
            )


def _variables(job: Job) -> dict[str, str]:
    row = fabric_of(job)
    return {line.name: line.value for line in row.variables} if row else {}
