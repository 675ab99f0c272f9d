"""Table of the programs that build images, and the choice among them. Imports no torch."""

import os
import shutil

from trainer.config.image import Image
from trainer.errors import ClusterError, InputError
from trainer.image.builder import Builder, Stored
from trainer.image.daemon import client
from trainer.image.docker_builders import Buildkit, Classic
from trainer.image.storage_builders import Buildah, Podman
from trainer.text.terminal import say

BUILDERS: dict[str, Builder] = {row.name: row for row in (Classic(), Buildkit(), Podman(), Buildah())}
AUTO = "auto"


def builder_of(image: Image) -> Builder:
    """Returns the builder that a job names, without a look at what is installed; auto: one of Docker's."""
    return BUILDERS[
        image.builder if image.builder != AUTO else "buildkit" if image.site.secrets else "classic"
    ]


def builder_here(image: Image) -> Builder:
    """Returns the builder that builds a job's image here.

    auto: podman or buildah where no Docker daemon answers, which a line says. Raises ClusterError or
    InputError, if none is here.
    """
    if image.builder != AUTO:
        return builder_of(image)
    try:
        client().close()
    except (ClusterError, InputError) as problem:
        if not (others := _without_daemon()):
            raise
        say(f'{problem}; {others[0].name} takes its place, as with image.builder = "{others[0].name}"')
        return others[0]
    return builder_of(image)


def found(image: str, name: str = AUTO) -> tuple[Builder, Stored]:
    """Returns who has an image on this machine, and what it is.

    auto: the Docker daemon, else podman or buildah, which a line says. Raises ClusterError or InputError.
    """
    if name != AUTO:
        return BUILDERS[name], BUILDERS[name].stored(image)
    docker = BUILDERS["classic"]
    try:
        return docker, docker.stored(image)
    except (ClusterError, InputError) as problem:
        for other in _without_daemon():
            try:
                stored = other.stored(image)
            except ClusterError:
                continue
            say(f"{problem}; {other.name} has {image}")
            return other, stored
        raise


def _without_daemon() -> list[Builder]:
    """Returns podman and buildah, if they are installed; none if the user names a Docker daemon."""
    if os.environ.get("DOCKER_HOST") or os.environ.get("DOCKER_CONTEXT"):
        return []
    return [BUILDERS[name] for name in ("podman", "buildah") if shutil.which(name)]
