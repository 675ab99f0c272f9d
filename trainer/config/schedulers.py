"""Table of schedulers: what the job file and the command line need to know of one before it is used.

What a scheduler does is a class, in the table of `trainer.launch.schedulers`; the keys of its section are a
class, too, in `trainer.config.sections`. All three have the same names. Data alone: `clipship --help` imports
no scheduler.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SchedulerRow:
    """Facts about one scheduler."""

    name: str
    """Section of the job file, and the word after `clipship submit --to`."""
    rendered: str
    """Line of `clipship render --help` that says what the submitted text is."""
    readers: str = "the submitted text"
    """Name of the submitted text and its readers; values of a job that look like secrets would get there."""
    secret: str | None = None
    """Key that gives the variable {name} a value from a secret store; None if the scheduler has none."""
    takes_several: bool = False
    """True if it takes the jobs of a sweep at once, and starts only so many of them at a time."""
    details: tuple[str, ...] = ()
    """Names of the facts that the record of each submission must have."""
    forms: Mapping[str, str] = field(default_factory=dict)
    """Patterns of what the record's `id`, and details by their names, must be: what is read becomes arguments
    of the scheduler's commands, and others may have written it."""
    client: str | None = None
    """Python package that it needs beside Clipship's own, to reach its cluster."""


_SLURM = SchedulerRow(
    name="slurm",
    rendered="The batch script for sbatch.",
    readers="the batch script",
    takes_several=True,
    forms={"id": r"[0-9]+(_[0-9]+)?", "cluster": r"(?!all$)\w[\w.-]*"},
)
_KUBERNETES = SchedulerRow(
    name="kubernetes",
    rendered="The objects that `kubectl apply` takes: a ConfigMap, and an MPIJob, Job or TrainJob.",
    readers="the ConfigMap and the objects beside it, which all who may read them in the namespace see",
    secret='kubernetes.env.{name} = "secret:SECRET:KEY" takes the value from a Secret',
    details=("context", "namespace", "name", "uid"),
    client="kubernetes",
)

SCHEDULERS: dict[str, SchedulerRow] = {row.name: row for row in (_SLURM, _KUBERNETES)}
"""Rows by name."""
