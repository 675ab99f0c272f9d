"""Programs that build images, as `image.builder` names them, and what each of them can do. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Abilities:
    """Abilities of one builder."""

    keeps_secrets: bool
    """True if a file that a step needs stays out of the image and its history."""
    compressions: tuple[str, ...]
    """Values of image.compression in which it can push layers."""
    digests: tuple[str, ...]
    """Command that prints the id and the digests of the image whose name follows."""


_INSPECT = ("image", "inspect", "--format", "{{.Id}}{{range .RepoDigests}} {{.}}{{end}}")
_INSPECT_BUILDAH = ("inspect", "--type=image", "--format", "{{.FromImageID}} {{.FromImageDigest}}")
_CHUNKED = ("gzip", "zstd", "zstd:chunked")
ABILITIES = {
    "classic": Abilities(False, ("gzip",), ("docker", *_INSPECT)),
    "buildkit": Abilities(True, ("gzip", "zstd", "estargz"), ("docker", *_INSPECT)),
    "podman": Abilities(True, _CHUNKED, ("podman", *_INSPECT)),
    "buildah": Abilities(True, _CHUNKED, ("buildah", *_INSPECT_BUILDAH)),
}


def asked(builder: str) -> tuple[str, ...]:
    """Returns the command that prints the digests of the image whose name follows; auto: that of Docker."""
    return ABILITIES.get(builder, ABILITIES["classic"]).digests
