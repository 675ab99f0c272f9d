"""Tells where pods see the files of a job: on its volumes, or out of its ConfigMap. Imports no torch."""

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trainer.config import Job
from trainer.config.kubernetes import Mount
from trainer.config.training import is_config_file
from trainer.safe_io.plain import read_plain

_MOST_BYTES = 256 * 1024
"""Limit of a model's config in the ConfigMap, which holds 1 MiB: hundred times the largest of open_clip's."""


@dataclass(frozen=True)
class Carried:
    """A file that travels with the job, and is in the pods where the job looks for it."""

    path: str
    name: str
    """Name in the job's ConfigMap."""
    text: str


def on_volume(path: str, job: Job) -> Mount | None:
    """Returns the innermost volume of the job's pods that contains the path.

    Returns None for the image's own files.
    """
    plain = PurePosixPath(posixpath.normpath(path))
    places = [mount for mount in job.kubernetes.volumes if plain.is_relative_to(mount.path)]
    return max(places, key=lambda mount: len(mount.path), default=None)


def carried(job: Job) -> Iterator[Carried]:
    """Yields the model configs that travel with the job: this machine has them, and no volume of the pods."""
    names = {job.model.teacher: "teacher.json", job.model.name: "model.json"}  # one file may be both
    for path, name in names.items():
        if path is not None and is_config_file(path) and on_volume(path, job) is None:
            try:
                yield Carried(path, name, read_plain(Path(path), most=_MOST_BYTES, links=True))
            except (OSError, ValueError):
                continue  # the image may have it
