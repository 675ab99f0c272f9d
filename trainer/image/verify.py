"""Inspects an image by running it: the self-test, and the list of its packages.

Uses the Docker SDK; imports no torch.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from trainer.config.stack_table import StackRow, table
from trainer.errors import ClusterError
from trainer.image.build_errors import likely_cause
from trainer.image.daemon import daemon, stored_image
from trainer.image.sbom_documents import Contents, Package

_PYTHON = "/opt/clipship/bin/python"
_SELFTEST = ("-P", "-m", "trainer.image.selftest")
_OF_BASE = "base"  # the value of stack.torch for it
_SHARED_MEMORY = 2**30
"""Bytes of a container's /dev/shm, through which ranks communicate; Docker's default of 64 MiB is too
small."""


def verify(image: str) -> tuple[dict[str, Any], StackRow | None]:
    """Run the self-test in the image; returns the facts found and the matching row of the table.

    The row is None if none matches. Raises ClusterError if a check fails.
    """
    expected = _expectations(image)
    output = _run(image, [_PYTHON, *_SELFTEST, *expected])
    facts: dict[str, Any] = json.loads(output)
    return facts, table().matching(facts["torch"], facts["cuda"], facts["nccl"])


def has_own_torch(image: str) -> bool:
    """Returns whether the image's torch is its base's, for which the table need not have a row."""
    return labels(image).get("org.clipship.torch") == _OF_BASE


def contents(image: str) -> Contents:
    """Returns the installed packages of the image, sorted, and what the image is."""
    rows = json.loads(_run(image, [_PYTHON, "-P", "-m", "trainer.image.sbom"]))
    release = _run(image, ["cat", "/etc/os-release"]).splitlines()
    systems = (line.removeprefix("ID=").strip("\"'") for line in release if line.startswith("ID="))
    with daemon(image) as connected:
        stored = stored_image(connected, image)
    created = datetime.fromisoformat(stored.attrs["Created"]).astimezone(UTC).replace(microsecond=0)
    packages = tuple(Package(*row) for row in rows)
    return Contents(image, stored.id, created, next(systems, "debian"), packages)


def labels(image: str) -> Mapping[str, str]:
    """Returns the image's labels. Raises ClusterError if the image is not on this machine."""
    with daemon(image) as connected:
        stored: Mapping[str, str] = stored_image(connected, image).labels
    return stored


def _expectations(image: str) -> Sequence[str]:
    """Returns the options of the self-test for what the image's labels promise."""
    promised = labels(image)
    versions = {name: promised.get(f"org.clipship.{name}") for name in ("torch", "cuda", "nccl")}
    row = table().matching(*(versions[name] or "" for name in ("torch", "cuda", "nccl")))
    archs = {"archs": ",".join(row.archs)} if row else {}
    compiler = ["--compiler"] if "org.clipship.compiler" in promised else []
    return [
        argument
        for name, value in {**versions, **archs}.items()
        if value and value != _OF_BASE
        for argument in (f"--{name}", value)
    ] + compiler


def _run(image: str, command: Sequence[str]) -> str:
    """Run the command in a container of the image, which is then removed; returns its stdout.

    Raises ClusterError if the command fails.
    """
    if "org.clipship.torch" not in labels(image):
        raise ClusterError(
            f"{image} was not made by `clipship image build` or from such an image, so it has no self-test"
        )
    with daemon(image) as connected:
        container = connected.containers.create(
            image, list(command), entrypoint="", network_mode="none", shm_size=_SHARED_MEMORY
        )
        try:
            container.start()
            code = container.wait()["StatusCode"]
            output: str = container.logs(stdout=True, stderr=False).decode(errors="replace")
            errors = container.logs(stdout=False, stderr=True).decode(errors="replace")
        finally:
            container.remove(force=True)
    if code != 0:
        last_lines = "\n".join(f"{output}{errors}".splitlines()[-25:])
        cause = likely_cause(last_lines)
        raise ClusterError(
            f"{image}: {command[-1]} ended with exit code {code}:\n{last_lines}"
            + (f"\nlikely cause: {cause}" if cause else "")
        )
    return output
