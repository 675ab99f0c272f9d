"""Warnings of `clipship check` about places that the nodes of a cluster cannot reach. Imports no torch."""

from collections.abc import Iterator
from pathlib import PurePosixPath

from trainer.config import Job
from trainer.config.stages import paths_of_ranks

_OWN_TO_A_NODE = ("/tmp", "/var/tmp", "/dev/shm")
_PLACEHOLDERS = (".example", ".invalid", ".test")
"""Endings of host names that belong to nobody: presets and pages write them (RFC 2606)."""


def odd_places(job: Job) -> Iterator[str]:
    """Yields a sentence for a registry that is a placeholder, and for each file in a node's own folders."""
    registry = (job.image.tag or "").partition("/")[0].partition(":")[0]
    if registry.endswith(_PLACEHOLDERS):
        yield (
            f"image.tag = {job.image.tag}: {registry} is a placeholder, from which no node can pull: write "
            "the name of your registry"
        )
    paths = dict.fromkeys(path for path, mark in paths_of_ranks(job) if not mark.made)
    for path in paths:
        if (folder := _own_folder(path)) and not _mounted(path, job):
            yield (
                f"{path} is in {folder}, which each node has for itself: the ranks see it only if every node "
                "has it there; put it on a file system that all nodes share"
            )


def _own_folder(path: str) -> str | None:
    return next((folder for folder in _OWN_TO_A_NODE if PurePosixPath(path).is_relative_to(folder)), None)


def _mounted(path: str, job: Job) -> bool:
    """Returns whether a mount of the job's containers is in the place of that folder."""
    own = [mount.split(":")[1] for mount in job.slurm.mounts if ":" in mount]
    own += [mount.path for mount in job.kubernetes.volumes]
    return any(PurePosixPath(path).is_relative_to(mount) for mount in own)
