"""Options of sbatch and srun that a job file may not give under their own names. Imports no pydantic."""

import re
from collections.abc import Mapping

_OPTION = re.compile(r"[a-z][a-z0-9-]*")
OWN_OPTIONS = {
    "job-name": "name",
    "nodes": "resources.nodes",
    "ntasks": "[resources]",
    "ntasks-per-node": "resources.gpus_per_node",
    "gpus": "[resources]",
    "gpus-per-node": "resources.gpus_per_node",
    "gpus-per-task": "[resources]",
    "cpus-per-task": "resources.cpus_per_gpu",
    "cpus-per-gpu": "resources.cpus_per_gpu",
    "mem": "slurm.mem",
    "time": "slurm.time",
    "mem-per-gpu": "resources.mem_gb_per_gpu",
    "mem-per-cpu": "slurm.mem",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "constraint": "slurm.constraint",
    "reservation": "slurm.reservation",
    "nodelist": "slurm.nodelist",
    "exclude": "slurm.exclude",
    "exclusive": "slurm.exclusive",
    "gres": "slurm.gres",
    "output": "slurm.output",
    "array": "slurm.array",
    "dependency": "slurm.dependency",
    "mail-type": "slurm.mail_type",
    "mail-user": "slurm.mail_user",
    "signal": "slurm.signal",
    "requeue": "slurm.requeue",
    "no-requeue": "slurm.requeue",
    "export": "[env]",
    "export-file": "[env]",
}
"""Options of sbatch that the script sets from other keys: option -> key or section."""
FIXED_OPTIONS = {
    "chdir": "paths in a job file do not depend on the working folder",
    "error": "errors go where the output goes",
    "open-mode": "it is always append",
    "wrap": "clipship writes the script",
    "hold": "render the script and submit it by `sbatch --hold`",
    "parsable": "clipship reads sbatch's answer",
}
"""Options of sbatch that no key sets: option -> reason, or what to do instead."""
STEP_OPTIONS = {
    "nodes": "resources.nodes",
    "nodelist": "slurm.nodelist",
    "exclude": "slurm.exclude",
    "ntasks": "[resources]",
    "ntasks-per-node": "resources.gpus_per_node",
    "cpus-per-task": "resources.cpus_per_gpu",
    "mpi": "slurm.mpi",
    "kill-on-bad-exit": "[recovery]",
    "no-kill": "[recovery]",
    "wait": "[recovery]",
    "export": "[env]",
    "container-image": "slurm.image",
    "container-mounts": "slurm.mounts",
    "container-env": "[env]",
    "job-name": "name",
}
"""Options of the ranks' srun that the script sets from other keys: option -> key or section."""
FIXED_STEP_OPTIONS = {
    "distribution": "the ranks of a node follow each other",
    "label": "clipship tells the ranks' lines apart by it",
    "unbuffered": "lines are to be seen as they come",
    "output": "clipship chooses the output's file",
    "error": "errors go where the output goes",
    "chdir": "paths in a job file do not depend on the working folder",
    "jobid": "the step belongs to the job that runs the script",
    "pty": "ranks have no terminal",
    "multi-prog": "all ranks run the same program",
    "container-name": "containers are removed after each start",
    "container-workdir": "it is the image's /workspace",
    "container-entrypoint": "ranks start without the image's entry point",
}
"""Options of the ranks' srun that no key sets: option -> reason."""


def check_options(
    options: Mapping[str, str | bool],
    program: str,
    example: str,
    own: Mapping[str, str],
    fixed: Mapping[str, str],
) -> None:
    """Raises ValueError for options that are none, that follow from other keys (`own`) or are `fixed`."""
    for name, given in options.items():
        if not _OPTION.fullmatch(name):
            raise ValueError(
                f'"{name}" is not a long option of {program}; write it without the dashes: {example}'
            )
        if name in own:
            raise ValueError(f"{name} follows from {own[name]}: change that instead")
        if name in fixed:
            raise ValueError(f"{name} cannot be set: {fixed[name]}")
        if isinstance(given, str) and not given.isprintable():
            raise ValueError(f"{name} = {given!r} must be one line of printable characters")
