"""Looks into an image by running it: the proof again, and the list of what is in it. Through the Docker SDK; no torch."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.errors import ClusterError
from trainer.launch.image.causes import likely_cause
from trainer.launch.image.daemon import daemon
from trainer.launch.image.table import Row, table

_PYTHON = "/opt/clipship/bin/python"
_PROOF = ("-P", "-m", "trainer.proof")
_OF_BASE = "base"  # as stack.torch says it
_SHARED_MEMORY = 2**30  # bytes; torch's and Horovod's ranks talk through it, and a container's 64 MiB are soon full


def verify(image: str) -> tuple[dict[str, Any], Row | None]:
    """Run the proof in the image; returns what it found and the row of the table that it matches.

    Raises ClusterError where a proof fails.
    """
    expected = _expectations(image)
    output = _run(image, [_PYTHON, *_PROOF, *expected])
    facts: dict[str, Any] = json.loads(output)
    return facts, table().matching(facts["torch"], facts["cuda"], facts["nccl"])


def has_own_torch(image: str) -> bool:
    """Whether its torch is that of its base, which no row of the table need have."""
    return labels(image).get("org.clipship.torch") == _OF_BASE


def packages(image: str) -> list[tuple[str, str, str, str]]:
    """Of what is installed: where it comes from (python, system), name, version, licence; sorted."""
    rows: list[tuple[str, str, str, str]] = [tuple(row) for row in json.loads(_run(image, [_PYTHON, "-P", "-m", "trainer.installed"]))]
    return rows


def labels(image: str) -> Mapping[str, str]:
    """Raises ClusterError where there is no such image here."""
    with daemon(image) as connected:
        from docker.errors import ImageNotFound

        try:
            found: Mapping[str, str] = connected.images.get(image).labels
        except ImageNotFound:
            raise ClusterError(f"there is no image {image} on this machine: build or pull it; `docker images` lists what is here") from None
    return found


def _expectations(image: str) -> Sequence[str]:
    """What the image's labels promise."""
    found = labels(image)
    said = {name: found.get(f"org.clipship.{name}") for name in ("torch", "cuda", "nccl")}
    row = table().matching(*(said[name] or "" for name in ("torch", "cuda", "nccl")))
    archs = {"archs": ",".join(row.archs)} if row else {}
    compiler = ["--compiler"] if "org.clipship.compiler" in found else []
    return [word for name, value in {**said, **archs}.items() if value and value != _OF_BASE for word in (f"--{name}", value)] + compiler


def _run(image: str, command: Sequence[str]) -> str:
    """What the command says on stdout in a container of the image, which is removed. Raises ClusterError where it fails."""
    if "org.clipship.torch" not in labels(image):
        raise ClusterError(f"{image} is no image of `clipship image build`, nor made from one: there is nothing in it to look with")
    with daemon(image) as connected:
        container = connected.containers.create(image, list(command), entrypoint="", network_mode="none", shm_size=_SHARED_MEMORY)
        try:
            container.start()
            code = container.wait()["StatusCode"]
            output: str = container.logs(stdout=True, stderr=False).decode(errors="replace")
            errors = container.logs(stdout=False, stderr=True).decode(errors="replace")
        finally:
            container.remove(force=True)
    if code != 0:
        said = "\n".join(f"{output}{errors}".splitlines()[-25:])
        cause = likely_cause(said)
        raise ClusterError(f"{image}: {command[-1]} ended with {code}:\n{said}" + (f"\nlikely cause: {cause}" if cause else ""))
    return output
