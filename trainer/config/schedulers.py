"""Table of schedulers: what the job file and the command line need to know of one before it is used.

The classes of its section and of what it does are named here, and imported where they are used: `clipship
--help` imports no scheduler.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SchedulerRow:
    """Facts about one scheduler."""

    name: str
    """Section of the job file, and the word after `clipship submit --to`."""
    section: str
    """Class of its keys, a `SchedulerSection`, as MODULE:CLASS."""
    control: str
    """Class of what it does, a `trainer.launch.submission.Scheduler`, as MODULE:CLASS."""
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
    section="trainer.config.slurm:Slurm",
    control="trainer.launch.slurm.scheduler:SlurmScheduler",
    rendered="The batch script for sbatch.",
    readers="the batch script",
    takes_several=True,
    forms={"id": r"[0-9]+(_[0-9]+)?", "cluster": r"(?!all$)\w[\w.-]*"},
)
_KUBERNETES = SchedulerRow(
    name="kubernetes",
    section="trainer.config.kubernetes:Kubernetes",
    control="trainer.launch.kubernetes.scheduler:KubernetesScheduler",
    rendered="The objects that `kubectl apply` takes: a ConfigMap, and an MPIJob, Job or TrainJob.",
    readers="the ConfigMap and the objects beside it, which all who may read them in the namespace see",
    secret='kubernetes.env.{name} = "secret:SECRET:KEY" takes the value from a Secret',
    details=("context", "namespace", "name", "uid"),
    client="kubernetes",
)

SCHEDULERS: dict[str, SchedulerRow] = {row.name: row for row in (_SLURM, _KUBERNETES)}
"""Rows by name. One that is added before `trainer.config.job` is imported is served like the others."""
