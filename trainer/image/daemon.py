"""Asks the Docker daemon by the Docker SDK, where the docker command has no good answer. Imports no torch.

That is whether a daemon answers, and why not, for the SDK's errors have kinds where the command prints lines;
and the digest that a registry has, for which the command would pull the image. All else is the command's
(`builders`): it follows contexts and `docker login` by itself.
"""

import os
import shutil
from typing import Any

from trainer.errors import ClusterError, InputError

LOCAL = "http+docker://localhost"
"""Address that the SDK reports for a daemon behind a socket of this machine."""


def client() -> Any:
    """Returns a docker.DockerClient whose daemon, that of the docker command, has answered.

    Raises ClusterError if there is no daemon, InputError if the SDK is not installed.
    """
    try:
        # `import docker` would also find a folder docker/ on sys.path, which has no module client
        from docker.client import from_env
        from docker.context import ContextAPI
        from docker.errors import DockerException
    except ImportError:
        raise InputError(
            "the Docker SDK for Python is not installed: pip install 'clipship[launch]'"
        ) from None

    name = os.environ.get("DOCKER_CONTEXT")
    try:
        # For a context that is not there the SDK would take the default one.
        known = os.environ.get("DOCKER_HOST") or ContextAPI.get_context(name)
        connected = from_env(use_ssh_client=True) if known else None
    except Exception as problem:
        said = str(problem)
        if not isinstance(problem, DockerException):  # the SDK reads the configuration without a look
            folder = os.environ.get("DOCKER_CONFIG", "~/.docker")
            said = f"{type(problem).__name__}: {said}; config.json or contexts/ in {folder} may be damaged"
        raise ClusterError(_unreachable(said)) from None
    if connected is None:
        raise ClusterError(
            f"there is no Docker context {name or 'as the configuration names it'}: `docker context ls` "
            "lists them"
        )
    return connected


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


def digest_at_registry(name: str, advice: str) -> str:
    """Returns the digest that a registry has under the name now.

    Raises ClusterError, with the advice, if the daemon cannot ask it.
    """
    connected = client()
    from docker.credentials.errors import StoreError
    from docker.errors import DockerException

    try:
        return str(connected.images.get_registry_data(name).id)
    except (DockerException, StoreError, OSError) as problem:  # the errors of requests are OSErrors
        said = getattr(problem, "explanation", None) or problem
        raise ClusterError(f"{name} cannot be asked for ({advice}): {said}") from None
