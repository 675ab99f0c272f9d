"""Packages that read data from object storage, by the beginning of its addresses. Imports none of them."""

from collections.abc import Iterator
from importlib.util import find_spec

from trainer.config import Job
from trainer.errors import InputError

STORAGE = {"s3://": ("s3fs", "'clipship[s3]'"), "gs://": ("gcsfs", "gcsfs")}
"""Module that opens the addresses, and what pip installs it by."""


def storage_needed(job: Job) -> Iterator[tuple[str, str, str]]:
    """Yields package, what pip installs, and the first of the job's addresses that needs it."""
    paths = [*job.data.train, *job.eval.retrieval, *job.eval.zero_shot]
    for scheme, (package, installed_by) in STORAGE.items():
        if path := next((path for path in paths if path.startswith(scheme)), None):
            yield package, installed_by, path


def check_storage(job: Job) -> None:
    """Raises InputError if this machine's ranks lack a package that the data needs."""
    for package, installed_by, path in storage_needed(job):
        if find_spec(package) is None:
            raise InputError(
                f"{path} needs the package {package}, which is not installed: "
                f"python -m pip install {installed_by}"
            )
