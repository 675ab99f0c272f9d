"""The Docker daemon: reaching it, and saying in words why it cannot be reached. Through the Docker SDK; no torch."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainer.errors import ClusterError, InputError

_FIRST_WITHOUT_BUILDKIT = 23
"""The major version of Docker's command that moved BuildKit into a plugin."""

_TIMEOUT_S = 600
_LOCAL = "http+docker://localhost"
"""How the SDK writes the address of a daemon behind a socket of this machine."""

BUILD_GB = 25
"""What a build needs on the daemon's disk: the wheels once in their stage, once in the image, once more while layers are made."""


def client() -> Any:
    """A connected docker.DockerClient. Raises ClusterError where none can be had."""
    try:
        from docker.client import DockerClient, from_env  # a folder docker/ on sys.path passes for the package, but has no such module
        from docker.errors import DockerException
    except ImportError:
        raise InputError("the Docker SDK for Python is not installed: pip install 'clipship[launch]'") from None

    try:
        context = _context()
        if context is None:
            connected = from_env(timeout=_TIMEOUT_S)
        else:
            tls = context.TLSConfig or False
            connected = DockerClient(base_url=context.Host, tls=tls, timeout=_TIMEOUT_S, use_ssh_client=context.Host.startswith("ssh://"))
        connected.ping()
    except DockerException as problem:
        raise ClusterError(_unreachable(str(problem))) from None
    return connected


def _context() -> Any:
    """The docker command's context, whose daemon it would ask; None where that is the default. The SDK's own from_env knows none."""
    from docker.context import ContextAPI

    if os.environ.get("DOCKER_HOST"):
        return None
    name = os.environ.get("DOCKER_CONTEXT")
    context = ContextAPI.get_context(name or None)
    if context is None:
        raise ClusterError(f"there is no Docker context {name or 'as the configuration names it'}: `docker context ls` lists them")
    return None if context.name == "default" else context


@contextmanager
def daemon(what: str) -> Iterator[Any]:
    """A connected docker.DockerClient for the work inside; what goes wrong there is a ClusterError that begins with `what`."""
    connected = client()
    from docker.credentials.errors import StoreError
    from docker.errors import APIError, DockerException

    try:
        yield connected
    except APIError as problem:
        raise ClusterError(f"{what}: {problem.explanation or problem}") from None
    except (DockerException, StoreError, OSError) as problem:  # requests' own are OSErrors
        raise ClusterError(f"{what}: {problem}") from None


def _unreachable(problem: str) -> str:
    if "Permission denied" in problem:
        return "the Docker daemon refuses this user: join the group docker (newgrp docker), or run as root"
    if shutil.which("dockerd") is None and shutil.which("docker") is None:
        return "Docker is not installed: on Debian and Ubuntu, apt-get install docker.io; elsewhere docs.docker.com/engine/install"
    return f"the Docker daemon does not answer: start it (systemctl start docker, or dockerd), or set DOCKER_HOST. It said: {problem}"


def buildkit_command() -> str:
    """The docker command that can ask the daemon for BuildKit: one with the plugin buildx, or one from before it. Raises ClusterError."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    found = dict.fromkeys(path for folder in folders if (path := shutil.which("docker", path=folder)))
    for command in found:
        version = _says(command, "version", "--format", "{{.Client.Version}}")
        if _says(command, "buildx", "version") or 0 < int(version.partition(".")[0] or 0) < _FIRST_WITHOUT_BUILDKIT:
            return command
    if found:
        raise ClusterError(f"{next(iter(found))} has no plugin buildx, which BuildKit needs: install docker-buildx")
    raise ClusterError("BuildKit is reached through the command docker, which is not installed (Debian, Ubuntu: docker.io)")


def _says(*command: str) -> str:
    """Its first line on stdout; empty where it fails. The version of a client is said without a daemon, too, with exit code 1."""
    lines = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.splitlines()
    return lines[0].strip() if lines else ""


def check_disk(connected: Any, needed_gb: int = BUILD_GB) -> None:
    """Raises ClusterError where the daemon's disk, if it is this machine's, is too full for a build."""
    if connected.api.base_url != _LOCAL:
        return
    root = connected.info().get("DockerRootDir", "")
    try:
        free_gb = shutil.disk_usage(root).free / 1e9
    except OSError:
        return  # the daemon has a root folder of its own: rootless, or in a virtual machine
    if free_gb < needed_gb:
        raise ClusterError(
            f"the disk of {root} has {free_gb:.0f} GB free and a build needs {needed_gb}: "
            "`docker system prune` frees what is unused; or go on at your own risk with --any-disk"
        )
