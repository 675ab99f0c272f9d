"""Finds settings of a job that cannot work on Slurm. Pure: asks no cluster."""

from collections.abc import Iterator

from trainer.comm.backends import check_lost_nodes, check_restarts, row_of
from trainer.config import Job
from trainer.config.batch_plan import plan
from trainer.config.types import STANDARD_INPUT
from trainer.errors import InputError
from trainer.launch.fabric import conflicts, refusal


def validate(job: Job) -> None:
    """Raises InputError with every problem, one per line."""
    problems = list(_problems(job))
    if problems:
        raise InputError("\n".join(problems))


def warnings(job: Job) -> Iterator[str]:
    """Yields a sentence for each setting that is allowed but rarely meant."""
    yield from conflicts(job)


def starter(job: Job) -> str:
    """Returns the command that starts the ranks: srun, or mpirun inside the allocation."""
    return job.slurm.launcher


def can_keep_going(job: Job) -> bool:
    """Returns whether the ranks' launcher lets the others go on when a supervisor or a node is lost."""
    return job.slurm.launcher == "srun" and row_of(job).uses_master_address


def _problems(job: Job) -> Iterator[str]:
    if STANDARD_INPUT in job.data.train:
        yield (
            f"data.train = {STANDARD_INPUT}: a batch job has no standard input; give the command that writes "
            "the samples, as pipe:COMMAND"
        )
    if bound := row_of(job).bound_to(job.comm):
        yield (
            f"{bound[0]} needs {bound[1]}, but {job.slurm.launcher} starts the ranks of a batch job: "
            "leave it out"
        )
    if job.slurm.container != "none" and job.slurm.image is None and job.image.tag is None:
        yield f'slurm.container = "{job.slurm.container}" needs an image: give slurm.image or image.tag'
    yield from refusal(job, "slurm")
    for check in (
        lambda: plan(job, job.resources.world_size),
        lambda: check_restarts(job, "mpirun"),
        lambda: check_lost_nodes(job, f"[slurm], {job.slurm.launcher}", keeps_going=can_keep_going(job)),
    ):
        try:
            check()
        except InputError as problem:
            yield str(problem)
