"""Pushes an image to a registry and returns its digest, under which the image cannot change later.

Uses the Docker SDK; imports no torch.
"""

from trainer.errors import ClusterError, InputError
from trainer.image.daemon import daemon


def push(tag: str) -> str:
    """Push the image; returns its full name with its digest, name@sha256:...

    Raises InputError for a name with a digest, ClusterError if the registry or the daemon refuses.
    """
    if "@" in tag:
        raise InputError(
            f"image.tag: {tag} is a digest, so this image has already been pushed; give a name: --set "
            "image.tag=NAME:TAG"
        )
    name, _, version = tag.rpartition(":") if ":" in tag.rpartition("/")[2] else (tag, "", "latest")
    digest = ""
    with daemon(f"{tag} was not pushed ({_ADVICE})") as connected:
        for message in connected.api.push(name, tag=version, stream=True, decode=True):
            if "error" in message:
                raise ClusterError(f"{tag} was not pushed: {message['error']}. {_ADVICE}")
            digest = message.get("aux", {}).get("Digest", digest)
    if not digest:
        raise ClusterError(f"{tag} was pushed, but the registry returned no digest")
    return f"{name}@{digest}"


_ADVICE = (
    "`docker login HOST` stores a password for a registry; a registry without TLS must be in the daemon's "
    "insecure-registries"
)
