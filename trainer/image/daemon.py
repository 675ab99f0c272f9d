"""Connects to the Docker daemon, and explains why it cannot be reached.

Uses the Docker SDK; imports no torch.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainer.errors import ClusterError, InputError

_FIRST_WITHOUT_BUILDKIT = 23
"""Major version of the docker command that first had BuildKit in a plugin."""

_TIMEOUT_S = 600
_LOCAL = "http+docker://localhost"
"""Address that the SDK reports for a daemon behind a socket of this machine."""

BUILD_GB = 25
"""GB that a build needs on the builder's disk: the wheels once in their stage, once in the image, and once
more while layers are made."""


def client() -> Any:
    """Returns a connected docker.DockerClient.

    Raises ClusterError if there is no daemon, InputError if the SDK is not installed.
    """
    try:
        # `import docker` would also find a folder docker/ on sys.path, which has no module client
        from docker.client import DockerClient, from_env
        from docker.errors import DockerException
    except ImportError:
        raise InputError(
            "the Docker SDK for Python is not installed: pip install 'clipship[launch]'"
        ) from None

    try:
        context = _context()
        if context is None:
            connected = from_env(timeout=_TIMEOUT_S)
        else:
            tls = context.TLSConfig or False
            connected = DockerClient(
                base_url=context.Host,
                tls=tls,
                timeout=_TIMEOUT_S,
                use_ssh_client=context.Host.startswith("ssh://"),
            )
        connected.ping()
    except ClusterError:
        raise
    except DockerException as problem:
        raise ClusterError(_unreachable(str(problem))) from None
    except Exception as problem:  # the SDK reads the docker command's configuration without a look
        folder = os.environ.get("DOCKER_CONFIG", "~/.docker")
        said = f"{type(problem).__name__}: {problem}; config.json or contexts/ in {folder} may be damaged"
        raise ClusterError(_unreachable(said)) from None
    return connected


def _context() -> Any:
    """Returns the docker command's context, whose daemon that command would ask; None if it is the default.

    The SDK's own from_env ignores contexts.
    """
    from docker.context import ContextAPI

    if os.environ.get("DOCKER_HOST"):
        return None
    name = os.environ.get("DOCKER_CONTEXT")
    context = ContextAPI.get_context(name or None)
    if context is None:
        raise ClusterError(
            f"there is no Docker context {name or 'as the configuration names it'}: `docker context ls` "
            "lists them"
        )
    return None if context.name == "default" else context


@contextmanager
def daemon(what: str) -> Iterator[Any]:
    """Yields a connected docker.DockerClient.

    Errors in the block become ClusterErrors that begin with `what`.
    """
    connected = client()
    from docker.credentials.errors import StoreError
    from docker.errors import APIError, DockerException

    try:
        yield connected
    except APIError as problem:
        raise ClusterError(f"{what}: {problem.explanation or problem}") from None
    except (DockerException, StoreError, OSError) as problem:  # the errors of requests are OSErrors
        raise ClusterError(f"{what}: {problem}") from None


def stored_image(connected: Any, image: str) -> Any:
    """Returns the daemon's image of that name. Raises ClusterError if it has none."""
    from docker.errors import ImageNotFound

    try:
        return connected.images.get(image)
    except ImageNotFound:
        raise ClusterError(
            f"there is no image {image} on this machine: build or pull it; `docker images` lists the images "
            "that are here"
        ) from None


def _unreachable(problem: str) -> str:
    if "Permission denied" in problem:
        return "the Docker daemon refuses this user: join the group docker (newgrp docker), or run as root"
    if shutil.which("dockerd") is None and shutil.which("docker") is None:
        return (
            "Docker is not installed: on Debian and Ubuntu, apt-get install docker.io; elsewhere "
            "docs.docker.com/engine/install"
        )
    return (
        "the Docker daemon does not answer: start it (systemctl start docker, or dockerd), or set "
        f"DOCKER_HOST. It said: {problem}"
    )


def buildkit_command() -> str:
    """Returns a docker command that can use BuildKit.

    It has the plugin buildx, or is older than that plugin. Raises ClusterError if there is none.
    """
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    commands = dict.fromkeys(path for folder in folders if (path := shutil.which("docker", path=folder)))
    for command in commands:
        version = _first_line(command, "version", "--format", "{{.Client.Version}}")
        if (
            _first_line(command, "buildx", "version")
            or 0 < int(version.partition(".")[0] or 0) < _FIRST_WITHOUT_BUILDKIT
        ):
            return command
    if commands:
        raise ClusterError(
            f"{next(iter(commands))} lacks the plugin buildx, which BuildKit needs: install docker-buildx"
        )
    raise ClusterError(
        "BuildKit needs the command docker, which is not installed (Debian, Ubuntu: package docker.io)"
    )


def _first_line(*command: str) -> str:
    """Returns the first line of the command's stdout; "" if there is none.

    The exit code is ignored: without a daemon a client prints its version and exits with 1.
    """
    lines = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout.splitlines()
    return lines[0].strip() if lines else ""


def disk_of(connected: Any) -> str | None:
    """Returns the folder with the daemon's images; None if the daemon is on another machine."""
    return connected.info().get("DockerRootDir", "") if connected.api.base_url == _LOCAL else None


def check_disk(folder: str | None, prune: str, needed_gb: int = BUILD_GB) -> None:
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
