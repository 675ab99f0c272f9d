"""The Docker daemon: reaching it, and saying in words why it cannot be reached. Through the Docker SDK; no torch."""

import shutil
from typing import Any

from trainer.errors import ClusterError, InputError

BUILD_GB = 25
"""What a build needs on the daemon's disk: the wheels once in their stage, once in the image, once more while layers are made."""


def client() -> Any:
    """A connected docker.DockerClient. Raises ClusterError where none can be had."""
    import docker

    if not hasattr(docker, "from_env"):  # a folder called docker on sys.path passes for the package
        raise InputError("the Docker SDK for Python is not installed: pip install 'clipship[launch]'")
    try:
        connected = docker.from_env(timeout=600)
        connected.ping()
    except docker.errors.DockerException as problem:
        raise ClusterError(_unreachable(str(problem))) from None
    return connected


def _unreachable(problem: str) -> str:
    if "Permission denied" in problem:
        return "the Docker daemon refuses this user: join the group docker (newgrp docker), or run as root"
    if shutil.which("dockerd") is None and shutil.which("docker") is None:
        return "Docker is not installed: on Debian and Ubuntu, apt-get install docker.io; elsewhere docs.docker.com/engine/install"
    return f"the Docker daemon does not answer: start it (systemctl start docker, or dockerd), or set DOCKER_HOST. It said: {problem}"


def check_disk(connected: Any, needed_gb: int = BUILD_GB) -> None:
    """Raises ClusterError where the daemon's disk, if it is this machine's, is too full for a build."""
    root = connected.info().get("DockerRootDir", "")
    try:
        free_gb = shutil.disk_usage(root).free / 1e9
    except OSError:
        return  # the daemon runs elsewhere
    if free_gb < needed_gb:
        raise ClusterError(
            f"the disk of {root} has {free_gb:.0f} GB free and a build needs {needed_gb}: "
            "`docker system prune` frees what is unused; or go on at your own risk with --any-disk"
        )
