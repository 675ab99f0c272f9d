"""Finds keys that a job file sets and that change nothing, because other keys leave them without use.

Each key says at its declaration what it needs (`trainer.config.keys.OnlyIf`). Keys of [slurm] and
[kubernetes] say nothing: only that scheduler reads them. Pure; imports no torch.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.comm.backends import over_mpi
from trainer.config import Job
from trainer.config.keys import OnlyIf, conditions_of, section_of
from trainer.config.loader import own_keys
from trainer.config.schedulers import SCHEDULERS
from trainer.config.types import Section
from trainer.launch.schedulers import launchers_of

_OVER_MPI = OnlyIf(
    lambda job: any(over_mpi(job, launcher) for launcher in launchers_of(job)),
    "Gloo connects the ranks, and Horovod does that over MPI alone (comm.launcher)",
)
BY_LAUNCHER: Mapping[str, OnlyIf] = {
    "comm.horovod.hierarchical_allreduce": _OVER_MPI,
    "comm.horovod.hierarchical_allgather": _OVER_MPI,
}
"""Conditions that ask the table of backends, which the job file's model does not know."""


def unused_keys(job: Job) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields keys that the job sets without effect, with the reason; each key once.

    A file that sets all keys was written by Clipship; then only those count that differ from the default.
    """
    needed = {name for name in type(job).model_fields if name not in SCHEDULERS}
    table = own_keys(job, but_defaults=needed <= job.model_fields_set)
    keys: dict[OnlyIf, list[str]] = {}
    for key, condition in _without_effect(job, type(job), table):
        keys.setdefault(condition, []).append(key)
    for condition, names in keys.items():
        yield tuple(names), condition.why_not.format(job=job)


def _without_effect(
    job: Job, section: type[Section], table: Mapping[str, Any], prefix: str = "", outer: OnlyIf | None = None
) -> Iterator[tuple[str, OnlyIf]]:
    """Yields the keys of a section's table that have no effect, each with the first condition that fails.

    `outer` is the one that fails for the whole section.
    """
    for name, value in table.items():
        field, key = section.model_fields[name], f"{prefix}{name}"
        conditions = [*conditions_of(field), *([BY_LAUNCHER[key]] if key in BY_LAUNCHER else [])]
        failed = outer or next((one for one in conditions if not one.used(job)), None)
        if inner := section_of(field):
            yield from _without_effect(job, inner, value, f"{key}.", failed)
        elif failed:
            yield key, failed
