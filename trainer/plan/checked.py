"""The job that a command is given, after every check of what it names. Imports no torch."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from trainer.config import Job
from trainer.config.loader import load_job
from trainer.errors import InputError, problems_of
from trainer.launch.hosts import Host
from trainer.launch.local import ranks_of
from trainer.launch.schedulers import scheduler
from trainer.plan.check import check_job, check_without_files
from trainer.plan.device import no_gpu_here
from trainer.preflight.host_probe import try_place
from trainer.run.folder import run_folder

_ELSEWHERE = (
    "if only the cluster's nodes see the files of the job, use `clipship check --no-data`; for that, "
    "`clipship submit`, `sweep` and `resume` have --no-check"
)


def checked(
    job_path: Path,
    overrides: Sequence[str],
    ranks: int | None,
    *,
    hosts: Sequence[Host] | None = None,
    image: bool = False,
    files: bool = True,
    fresh: bool = False,
) -> tuple[Job, int, int | None]:
    """Returns the job, its world size and the number of samples, None if not known.

    `hosts` are those of --hosts, in place of `ranks`; `image` checks its image, batch script and MPIJob too;
    `files` opens the files that it names; `fresh` means that its run folder will be a new one. Raises
    InputError that lists every problem.
    """
    job = load_job(job_path, overrides)
    world_size = ranks_of(job, ranks, hosts)
    problems: list[str] = []
    samples = None
    try:
        samples = check_job(job, world_size, fresh=fresh) if files else check_without_files(job, world_size)
    except InputError as problem:
        problems.append(str(problem))
        if image and files and job.schedulers:
            problems.append(_ELSEWHERE)
    # `clipship check` without --nproc is about the cluster, if the job has one
    if files and (not image or ranks is not None or not (job.resources.nodes > 1 or job.schedulers)):
        problems += problems_of([lambda: try_place(job, run_folder(job))])
    if image and ranks is not None:
        problems += no_gpu_here(job, local=True)  # without --nproc another machine may be meant
    if image:
        problems += problems_of(
            partial(job_check, job) for job_check in _submission_checks(job, ranks, files=files)
        )
    if problems:
        raise InputError("\n".join(dict.fromkeys("\n".join(problems).splitlines())))
    return job, world_size, samples


def _submission_checks(job: Job, ranks: int | None, *, files: bool) -> Iterator[Callable[[Job], object]]:
    """Yields the checks of the job's image and of its schedulers; each of them raises InputError."""
    if job.model_fields_set & {"image", "stack"}:
        from trainer.image.compatibility import check_stack

        yield check_stack
    # an image with a digest is built already
    if files and job.image.tag is not None and "@" not in job.image.tag:
        from trainer.image.context import check_files

        yield lambda job: check_files(job.image.site)
    for name in job.schedulers if ranks is None else ():
        yield scheduler(name).validate
