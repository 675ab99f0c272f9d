"""Builds a job's image with its builder, and pushes it.

A push returns the digest under which the image cannot change later.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from trainer.config import Job
from trainer.config.image_name import bare_name
from trainer.errors import ClusterError, InputError
from trainer.image.builder import builder_here, builder_of, found
from trainer.image.context import check_files, context

_BUILD_GB = 25
"""GB that a build needs on the builder's disk: the wheels once in their stage, once in the image, and once
more while layers are made."""


def build(job: Job, *, any_disk: bool = False, attest: Sequence[str] = ()) -> str:
    """Build the job's image, tag it and return its id; output goes to stderr.

    `attest` are BuildKit's options to attach statements about the build.
    Raises ClusterError if the builder or the build fails, InputError if the job cannot be built.
    """
    if job.image.tag is None:
        raise InputError(
            "image.tag: missing; it names the image that is built, as registry.example/team/clipship:1"
        )
    if "@" in job.image.tag:
        raise InputError(
            f"image.tag: {job.image.tag} is a digest, which a build cannot choose; give a name: --set "
            "image.tag=NAME:TAG"
        )
    check_files(job.image.site)
    entries = context(job)
    builder = builder_here(job.image)
    if attest and builder.name != "buildkit":
        raise InputError(
            f"--sbom and --provenance are BuildKit's, and {builder.name} builds this image: add --set "
            "image.builder=buildkit, or leave them out"
        )
    if attest and job.image.compression != "gzip":
        raise InputError(
            f'image.compression: "{job.image.compression}" is made by another build, at the push, which '
            'loses what --sbom and --provenance attach: set it to "gzip", or leave them out'
        )
    folder = builder.folder()  # it says so if the builder is not installed
    if not any_disk:
        check_disk(folder, builder.prune)
    builder.build(job, entries, attest)
    return builder.stored(job.image.tag).id


def check_disk(folder: str | None, prune: str, needed_gb: int = _BUILD_GB) -> None:
    """Raises ClusterError if the disk with a builder's images, which `prune` would clean, is too full."""
    try:
        free_gb = shutil.disk_usage(folder or "").free / 1e9
    except OSError:
        return  # this machine does not see the folder: its daemon is elsewhere, rootless, or in a virtual one
    if free_gb < needed_gb:
        raise ClusterError(
            f"the disk of {folder} has {free_gb:.0f} GB free, but a build needs {needed_gb}: "
            f"`{prune}` deletes unused data; or continue at your own risk with --any-disk"
        )


def build_command(job: Job, folder: Path) -> list[str]:
    """Returns the command that builds the job's image from a folder that `write_folder` filled."""
    return builder_of(job.image).command(job, folder)


def push(job: Job) -> str:
    """Push the job's image; returns its full name with its digest, name@sha256:...

    Raises InputError for a name with a digest, ClusterError if the registry or the builder refuses.
    """
    tag = job.image.tag
    if tag is None:
        raise InputError(
            "image.tag: missing; give the registry and the image's name, such as "
            "registry.example/team/clipship:1"
        )
    if "@" in tag:
        raise InputError(
            f"image.tag: {tag} is a digest, so this image has already been pushed; give a name: --set "
            "image.tag=NAME:TAG"
        )
    builder, _ = found(tag, job.image.builder)
    if not (digest := builder.push(job, tag)):
        raise ClusterError(f"{tag} was pushed, but the registry returned no digest")
    return f"{bare_name(tag)}@{digest}"
