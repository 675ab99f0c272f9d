"""Text of `clipship check` about the packages of the ranks: image, or Python here. Imports no torch."""

import platform
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from trainer.comm.backends import BACKENDS
from trainer.config import Job
from trainer.config.stack_table import table
from trainer.config.tables import toml_text
from trainer.data.storage import storage_needed
from trainer.launch.schedulers import scheduler
from trainer.model.packages import needed, not_named
from trainer.sysinfo.versions import installed
from trainer.telemetry.writers import SERVICES

_PACKAGES = {"open_clip": "open_clip_torch"}
"""Packages that bring modules of another name."""


def environment_row(job: Job, *, local: bool) -> tuple[str, str]:
    """Returns what the ranks run in: the image, the Python that a scheduler's section names, or this one."""
    for name, section in () if local else job.schedulers.items():
        if text := section.environment:
            return "image" if section.uses_image else "environment", text
        if section.uses_image and job.image.tag is not None:
            chosen = scheduler(name).settled(job)[1]
            return "image", f"{job.image.tag} ({_stack(job)}){chosen and f'; {chosen}'}"
    names = dict.fromkeys(("torch", "open_clip", BACKENDS[job.comm.backend].library))
    versions = {name: installed(_PACKAGES.get(name, name)) for name in names}
    parts = [f"{name} {found}" for name, found in versions.items() if found]
    return "environment", f"{', '.join([f'Python {platform.python_version()}', *parts])} in {sys.prefix}"


def missing_here(job: Job, *, local: bool) -> Iterator[str]:
    """Yields a sentence for each group of modules that the job's ranks need and this Python lacks.

    Nothing for ranks that run elsewhere. Packages that a single key asks for are refused by `check_job`.
    """
    if not local:
        return
    backend = BACKENDS[job.comm.backend]
    tensorboard = ["tensorboard"] if job.logging.tensorboard else []
    if lacking := [name for name in ("torch", "open_clip", *tensorboard) if find_spec(name) is None]:
        yield (
            f"this Python lacks {', '.join(lacking)}, so that no rank can start here: "
            "python -m pip install 'clipship[train]' brings what is missing"
        )
    if backend.library not in lacking and find_spec(backend.library) is None:
        yield f"this Python lacks {backend.library}, so that no rank can start here: {backend.missing}"


def not_in_the_image(job: Job) -> Iterator[str]:
    """Yields a warning for each package that only a key of this job needs, so that the image may lack it."""
    if lacking := not_named(job):
        need = f"model.name = {job.model.name} needs {', '.join(lacking)} ({needed(job.model).reason})"
        yield (
            f"{need}: an image that is built from this job has it, an image of another job needs "
            f"image.pip_packages = {toml_text(lacking)}"
        )
    wanted = {package: path for package, _, path in storage_needed(job)}
    for name, setting in job.logging.services.items():
        wanted[SERVICES[name].package] = setting
    added = {re.split(r"[^\w.-]", text, maxsplit=1)[0].lower() for text in job.image.pip_packages}
    for package, reason in wanted.items():
        if package not in added:
            yield (
                f"{reason} needs the package {package}, which the image has only with image.pip_packages = "
                f"{toml_text([package])}"
            )


def _stack(job: Job) -> str:
    if job.stack.torch == "base":
        return f"the torch of {job.image.base}"
    row = table().stack(job.stack.torch, job.stack.nccl)
    return f"torch {row.torch}, CUDA {row.cuda}, NCCL {row.nccl}, on {job.image.base}"
