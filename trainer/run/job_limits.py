"""The job of a rank's arguments, and its time limits and run folder for a supervisor.

A supervisor reads no job file itself, because the job model imports pydantic.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer.config import Job
from trainer.config.loader import from_here, load_job
from trainer.config.world_sizes import needs_even_nodes, world_sizes
from trainer.errors import InputError
from trainer.run.folder import run_folder
from trainer.run.start_job import check_seen


def limits_of_job(arguments: Sequence[str]) -> dict[str, Any]:
    """Returns fields of `trainer.supervise.limits.Limits` for a rank's arguments, JOB [--set KEY=VALUE ...].

    Returns an empty table if the job cannot be read: the rank itself reports why.
    """
    try:
        job = job_of(arguments)
    except InputError:
        return {}
    names = ("init_s", "checkpoint_s", "shutdown_s", "silence_s")
    recovery = ("max_restarts", "same_fault_limit", "backoff_s", "min_nodes")
    return {
        **{name: getattr(job.timeouts, name) for name in names},
        **{name: getattr(job.recovery, name) for name in recovery},
        "run": job.name,
        "notify": job.logging.notify,
        "world_sizes": world_sizes(job),
        "even_nodes": needs_even_nodes(job),
        "run_folder": str(run_folder(job).absolute()),
    }


def job_of(arguments: Sequence[str]) -> Job:
    """Returns the job of a rank's arguments, JOB [--set KEY=VALUE ...]. Raises InputError."""
    overrides = [value for option, value in pairwise(arguments) if option == "--set"]
    overrides += [argument.partition("=")[2] for argument in arguments if argument.startswith("--set=")]
    return rank_job(Path(next(iter(arguments), "")), overrides)


def rank_job(path: Path, overrides: Sequence[str] = (), node: str = "") -> Job:
    """Returns a rank's job, which its process and those that it forks read once.

    `node` is that of the rank in a world of several: others may see the file. Raises InputError.
    """
    check_seen(path, node)
    try:
        status = path.stat()
    except (OSError, ValueError):
        return load_job(path, from_here(overrides))  # it says why
    return _read_once(path, from_here(overrides), (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=1)
def _read_once(path: Path, overrides: tuple[str, ...], stamp: tuple[int, ...]) -> Job:
    return load_job(path, overrides)


def job_if_readable(arguments: Sequence[str]) -> Job | None:
    """Returns the job of a rank's arguments as `job_of` does; None if it cannot be read."""
    try:
        return job_of(arguments)
    except InputError:
        return None
