"""Finds settings of a job that cannot work on Slurm. Pure: asks no cluster."""

import re
from collections.abc import Iterator

from trainer.comm.backends import (
    Launcher,
    check_lost_nodes,
    check_restarts,
    launcher_for,
    many_without_mpi,
    over_mpi,
    row_of,
)
from trainer.config import Job
from trainer.config.fabric_fit import fabric_problems, nccl_unknown
from trainer.config.slurm import check_output
from trainer.config.stages import standard_input
from trainer.config.world_sizes import check_batches
from trainer.errors import InputError, problems_of, raise_problems
from trainer.launch.fabric import conflicts, plugin_advice, refusal
from trainer.text.wording import many

_OF_THE_SCRIPT = re.compile("[a-z]+|IFS|UID|EUID|PPID|SHELLOPTS|BASHOPTS|BASH_VERSINFO")
"""Names that a batch script does not export: its own variables have lower-case letters alone, and bash lets
nobody set most of the others."""


def validate(job: Job) -> None:
    """Raises InputError with every problem, one per line."""
    raise_problems(_problems(job))


def warnings(job: Job) -> Iterator[str]:
    """Yields a sentence for each setting that is allowed but rarely meant."""
    if job.slurm.uses_image:
        yield from nccl_unknown(job)
        yield from plugin_advice(job)
    yield from conflicts(job)
    yield from many_without_mpi(job, launcher(job))
    if job.slurm.retries and job.slurm.nodelist:
        yield (
            "slurm.retries leaves out the node of a failure, and slurm.nodelist asks for it: a job that is "
            "queued again may wait for ever; name features of nodes by slurm.extra.constraint instead"
        )


def launcher(job: Job) -> Launcher:
    """Returns the launcher of the job's ranks as the backends know it.

    srun counts as mpirun for ranks that MPI connects: then it is MPI, by PMIx, that starts them.
    """
    if job.slurm.launcher == "mpirun":
        return "mpirun"
    chosen = launcher_for(job, several_hosts=True)
    return chosen if over_mpi(job, chosen) else "clipship"


def can_keep_going(job: Job) -> bool:
    """Returns whether the ranks' launcher lets the others go on when a supervisor or a node is lost."""
    return launcher(job) == "clipship"


def _problems(job: Job) -> Iterator[str]:
    if reads := standard_input(job):
        yield (
            f"{reads}: a batch job has no standard input; give the command that writes "
            "the samples, as pipe:COMMAND"
        )
    if job.slurm.launcher == "mpirun" and (bound := row_of(job).bound_to(job.comm)) and bound[1] != "mpirun":
        yield f'{bound[0]} needs slurm.launcher = "srun": set it, or leave the other out'
    if job.slurm.launcher == "mpirun" and row_of(job).over_mpi and job.comm.launcher == "clipship":
        yield 'comm.launcher = "clipship" needs slurm.launcher = "srun": set it, or leave the other out'
    if job.slurm.retries > job.slurm.max_restarts:
        yield (
            f"slurm.retries = {job.slurm.retries} starts a failed job more often than slurm.max_restarts = "
            f"{job.slurm.max_restarts} allows: raise max_restarts, or lower retries"
        )
    yield from _listed_gpus(job)
    yield from _variables(job)
    if job.slurm.container != "none" and job.slurm.image is None and job.image.tag is None:
        yield f'slurm.container = "{job.slurm.container}" needs an image: give slurm.image or image.tag'
    yield from refusal(job, "slurm")
    if job.slurm.uses_image:
        yield from fabric_problems(job)
    yield from problems_of(
        (
            lambda: _check_output(job.slurm.output),
            lambda: check_batches(job, job.resources.world_size),
            lambda: check_restarts(job, launcher(job)),
            lambda: check_lost_nodes(job, f"[slurm], {job.slurm.launcher}", keeps_going=can_keep_going(job)),
        )
    )


def _listed_gpus(job: Job) -> Iterator[str]:
    """Yields a problem if slurm.gres asks for another number of GPUs than the node's ranks use."""
    listed = sum(gpus.count for gpus in job.slurm.listed_gpus)
    wanted = job.resources.gpus_per_node
    if listed and listed != wanted:
        yield (
            f"slurm.gres asks for {many(listed, 'GPU')} of each node, and resources.gpus_per_node is "
            f"{'not set' if wanted is None else wanted}: set it to {listed}, one rank for each"
        )


def _variables(job: Job) -> Iterator[str]:
    """Yields a problem if the batch script cannot export a variable of [env] to the ranks.

    To apptainer each has another name.
    """
    own = [name for name in job.env if _OF_THE_SCRIPT.fullmatch(name)]
    if own and job.slurm.container != "apptainer":
        yield (
            f"{', '.join(own)}: [env] cannot set this on Slurm, where the batch script exports it: names of "
            "lower-case letters alone are the script's own variables, and the others are bash's; take "
            "another name"
        )


def _check_output(pattern: str | None) -> None:
    """Raises InputError if the folder of the job file, which a relative path begins with, cannot be written.

    A % in it stands for something else, and a line break would be one of the batch script.
    """
    try:
        if pattern is not None:
            check_output(pattern)
    except ValueError as problem:
        raise InputError(f"slurm.output: {problem}") from None
