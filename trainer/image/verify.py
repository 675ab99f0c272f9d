"""Inspects an image by running it: the self-test, and the list of its packages. Imports no torch."""

from collections.abc import Sequence
from typing import Any

from trainer.config.stack_table import StackRow, table
from trainer.errors import ClusterError
from trainer.image.builder import LAST_LINES, Builder, Stored, explained, found
from trainer.safe_io.plain import parse_json
from trainer.text.paste import command as paste

_PYTHON = "/opt/clipship/bin/python"
_SELFTEST = ("-P", "-m", "trainer.image.selftest")
OF_BASE = "base"
"""Value of stack.torch for the torch of the base, for which the table need not have a row."""


def verify(image: str, builder: str) -> tuple[str | None, dict[str, Any], StackRow | None]:
    """Run the self-test in the image; returns its stack's name, the facts found and the table's row of them.

    The row is None if none matches. Raises ClusterError if a check fails.
    """
    holder, stored = found(image, builder)
    output = _run(holder, stored, image, [_PYTHON, *_SELFTEST, *_expectations(stored)])
    try:
        facts: dict[str, Any] = parse_json(output)
        row = table().matching(facts["torch"], facts["cuda"], facts["nccl"])
    except (ValueError, KeyError, TypeError):
        raise ClusterError(f"{image}: its self-test answers with something else than its facts") from None
    own = stored.labels.get("org.clipship.torch") == OF_BASE
    name = OF_BASE if own else None if row is None else row.torch
    return name, facts, row


def packages(image: str, builder: str) -> str:
    """Returns the list of the packages installed in the image, as `trainer.image.sbom` prints it."""
    holder, stored = found(image, builder)
    return _run(holder, stored, image, [_PYTHON, "-P", "-m", "trainer.image.sbom"])


def _expectations(stored: Stored) -> Sequence[str]:
    """Returns the options of the self-test for what the image's labels promise."""
    promised = stored.labels
    versions = {name: promised.get(f"org.clipship.{name}") for name in ("torch", "cuda", "nccl")}
    row = table().matching(*(versions[name] or "" for name in ("torch", "cuda", "nccl")))
    platform = promised.get("org.clipship.platform", "linux/amd64")
    archs = {"archs": ",".join(row.archs_on(platform))} if row else {}
    compiler = ["--compiler"] if "org.clipship.compiler" in promised else []
    return [
        argument
        for name, value in {**versions, **archs}.items()
        if value and value != OF_BASE
        for argument in (f"--{name}", value)
    ] + compiler


def _run(holder: Builder, stored: Stored, image: str, command: Sequence[str]) -> str:
    """Run the command in a container of the image; returns its stdout. Raises ClusterError if it fails."""
    if "org.clipship.torch" not in stored.labels:
        raise ClusterError(
            f"{image} was not made by `clipship image build` or from such an image, so it has no self-test"
        )
    done = holder.run(image, command)
    if done.returncode != 0:
        last = f"{done.stdout}{done.stderr}".splitlines()[-LAST_LINES:]
        raise ClusterError(
            f"{image}: {paste(*command)} ended with exit code {done.returncode}:\n{explained(last)}"
        )
    return done.stdout
