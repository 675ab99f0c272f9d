"""Table of schedulers: one row holds everything that the command line and the job file need for one.

A scheduler is one package (section of the job file, rendering, control) and one row here. Rows name code as
"module:attribute", which `trainer.sysinfo.imports.load` imports when it is needed: `clipship --help` imports
no scheduler.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SchedulerRow:
    """One scheduler. Code is named as "module:attribute", or as a module for `control`."""

    name: str
    """Section of the job file, and the word after `clipship submit --to`."""
    section: str
    """Subclass of `trainer.config.types.SchedulerSection` with the section's keys."""
    render: str
    """Function from a job to the text that is submitted. Pure; raises InputError."""
    rendered: str
    """Line of `clipship render --help` that says what the text is."""
    validate: str
    """Function of a job that raises InputError with every reason why the job cannot run there."""
    control: str
    """Module that implements `trainer.launch.submission.Scheduler`: submit, status, logs, cancel."""
    starter: str
    """Function from a job to the program that starts its ranks there, as messages name it."""
    launcher: str | None = None
    """Function from a job to the launcher of its ranks there, as the backends know it."""
    readers: str = "the submitted text"
    """Name of the submitted text and its readers; values of a job that look like secrets would get there."""
    secret: str | None = None
    """Key that gives the variable {name} a value from a secret store; None if the scheduler has none."""
    warnings: str | None = None
    """Function from a job to sentences about settings that are allowed but rarely meant."""
    summary: str | None = None
    """Function from a job to one line of `clipship check`."""
    record_folder: str | None = None
    """Function from a job to the folder that keeps the record of its submission, if its ranks see other files
    than this machine. None: the run folder, which this machine sees."""
    prepare: str | None = None
    """Function from a checked job to that folder, which it makes. None: the run folder is made."""
    submit_together: str | None = None
    """Function that submits several jobs of a sweep at once. It takes pairs of job and folder, the sweep's
    folder and the most at a time, and yields folders with their submissions. None: one by one."""
    unique_name: str | None = None
    """Function from a job to its name there, which no other job may have. None: names may be equal."""
    details: tuple[str, ...] = ()
    """Names of the facts that the record of each submission must have."""
    forms: Mapping[str, str] = field(default_factory=dict)
    """Patterns of what the record's `id`, and details by their names, must be: what is read becomes arguments
    of the scheduler's commands, and others may have written it."""
    client: str | None = None
    """Python package that `control` needs beside Clipship's own."""


_SLURM = SchedulerRow(
    name="slurm",
    section="trainer.config.slurm:Slurm",
    render="trainer.launch.slurm.script:batch_script",
    rendered="The batch script for sbatch.",
    validate="trainer.launch.slurm.script:batch_script",  # rendering also finds problems with mounts
    control="trainer.launch.slurm.scheduler",
    starter="trainer.launch.slurm.validate:starter",
    launcher="trainer.launch.slurm.validate:launcher",
    readers="the batch script",
    warnings="trainer.launch.slurm.validate:warnings",
    submit_together="trainer.launch.slurm.array:submit_together",
    forms={"id": r"[0-9]+(_[0-9]+)?", "cluster": r"(?!all$)\w[\w.-]*"},
)
_KUBERNETES = SchedulerRow(
    name="kubernetes",
    section="trainer.config.kubernetes:Kubernetes",
    render="trainer.launch.kubernetes.manifest:manifest",
    rendered="The objects that `kubectl apply` takes: a ConfigMap, and an MPIJob, Job or TrainJob.",
    validate="trainer.launch.kubernetes.validate:validate",
    control="trainer.launch.kubernetes.scheduler",
    starter="trainer.launch.kubernetes.kinds:starter",
    launcher="trainer.launch.kubernetes.kinds:launcher",
    readers="the ConfigMap and the objects beside it, which all who may read them in the namespace see",
    secret='kubernetes.env.{name} = "secret:SECRET:KEY" takes the value from a Secret',
    warnings="trainer.launch.kubernetes.validate:warnings",
    summary="trainer.launch.kubernetes.validate:summary",
    record_folder="trainer.launch.kubernetes.scheduler:record_folder",
    prepare="trainer.launch.kubernetes.scheduler:prepare",
    unique_name="trainer.launch.kubernetes.pods:run_name",
    details=("context", "namespace", "name", "uid"),
    client="kubernetes",
)

SCHEDULERS: dict[str, SchedulerRow] = {row.name: row for row in (_SLURM, _KUBERNETES)}
"""Rows by name. A row that is added before `trainer.config.job` is imported is served like the others."""
