"""Sends an image to a registry and says its digest, which cannot be changed behind a job's back. Through the Docker SDK; no torch."""

from trainer.errors import ClusterError
from trainer.launch.image.daemon import client


def push(tag: str) -> str:
    """The pushed image's full name with its digest: name@sha256:... Raises ClusterError where the registry or the daemon refuses."""
    from docker.errors import APIError

    name, _, version = tag.rpartition(":") if ":" in tag.rpartition("/")[2] else (tag, "", "latest")
    digest = ""
    try:
        for message in client().api.push(name, tag=version, stream=True, decode=True):
            if "error" in message:
                raise ClusterError(f"{tag} was not pushed: {message['error']}. {_ADVICE}")
            digest = message.get("aux", {}).get("Digest", digest)
    except APIError as problem:
        raise ClusterError(f"{tag} was not pushed: {problem.explanation or problem}. {_ADVICE}") from None
    if not digest:
        raise ClusterError(f"{tag} was pushed, and the registry named no digest")
    return f"{name}@{digest}"


_ADVICE = "`docker login HOST` stores a password for a registry; a registry without TLS must be in the daemon's insecure-registries"
