"""What in a job cannot work on Slurm. Pure: no cluster is asked."""

from collections.abc import Iterator

from trainer.errors import InputError
from trainer.job import Job
from trainer.job.fields import STANDARD_INPUT
from trainer.plan import plan


def refuse_misfits(job: Job) -> None:
    """Raises InputError with every problem, one a line."""
    problems = list(_problems(job))
    if problems:
        raise InputError("\n".join(problems))


def _problems(job: Job) -> Iterator[str]:
    if STANDARD_INPUT in job.data.train:
        yield f"data.train = {STANDARD_INPUT}: a batch job has no standard input; name what writes it, as pipe:COMMAND"
    if job.comm.backend == "horovod" and job.comm.horovod.cpu_operations == "gloo":
        yield f"comm.horovod.cpu_operations = gloo needs horovodrun, and {job.slurm.launcher} starts a batch job's ranks: leave it out"
    if job.slurm.container != "none" and job.slurm.image is None and job.image.tag is None:
        yield f'slurm.container = "{job.slurm.container}" needs an image: give slurm.image or image.tag'
    try:
        plan(job, job.resources.world_size)
    except InputError as problem:
        yield str(problem)
