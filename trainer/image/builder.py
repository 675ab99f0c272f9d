"""Defines what a program does that builds images and keeps them here: the methods of a row of `builders`.

Imports no torch.
"""

import csv
import io
import os
import re
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainer.config import Job
from trainer.errors import ClusterError, InputError
from trainer.image.base import mirrored_base
from trainer.image.build_errors import likely_cause
from trainer.image.context import Entry, write_folder
from trainer.image.source import revision
from trainer.text.terminal import say, shown

SHARED_MEMORY = 2**30
"""Bytes of a container's /dev/shm, through which ranks communicate; the usual 64 MiB are too few."""

_LAST_LINES = 25
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class BuildFailed(Exception):
    """The build failed; the text is the builder's own."""


def follow(lines: Iterator[str]) -> None:
    """Print the builder's lines.

    If the build fails, raises ClusterError with the last lines and the likely cause.
    """
    last: deque[str] = deque(maxlen=_LAST_LINES)
    try:
        for line in lines:
            clean = _COLOUR.sub("", line).rstrip()
            if clean:
                last.append(clean)
                print(shown(clean), file=sys.stderr, flush=True)
    except BuildFailed as problem:
        output = "\n".join(last)
        cause = likely_cause(f"{output}\n{problem}")
        hint = f"\nlikely cause: {cause}" if cause else ""
        raise ClusterError(f"the build failed: {problem}\nits last lines:\n{output}{hint}") from None


@dataclass(frozen=True)
class Stored:
    """An image on this machine."""

    id: str
    """Digest of its configuration, sha256:..."""
    names: tuple[str, ...]
    """Its names with a digest, as far as this machine knows them."""
    config: Mapping[str, Any]
    """Env, Labels, Entrypoint and others, under the names that Docker and OCI share."""
    size: int
    """Bytes of its files; 0 if the builder does not tell."""

    @property
    def labels(self) -> Mapping[str, str]:
        return self.config.get("Labels") or {}


class Builder(ABC):
    """A program that builds images, and keeps, runs, exports and pushes them.

    Methods raise ClusterError if the program fails, InputError if it is not installed.
    """

    name: ClassVar[str]
    words: ClassVar[tuple[str, ...]]
    """First words of the command that builds."""
    prune: ClassVar[str]
    """Command that makes room where its images lie."""

    @abstractmethod
    def folder(self) -> str | None:
        """Returns the folder with its images; None if that is not on this machine."""

    @abstractmethod
    def stored(self, image: str) -> Stored:
        """Returns the image of that name or id. Raises ClusterError if there is none."""

    @abstractmethod
    def run(self, image: str, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Run a command in a container of the image, without a network; the container is then removed."""

    @abstractmethod
    def export(self, image: str, files: bytes) -> AbstractContextManager[Iterator[bytes]]:
        """Yields the chunks of a tar of the image's files, and of those of another tar above them."""

    @abstractmethod
    def digest(self, name: str, platform: str) -> str:
        """Returns the digest that a registry has under the name now."""

    @abstractmethod
    def push(self, job: Job, tag: str) -> str:
        """Send the image to the registry in its name; returns its digest there."""

    def build(self, job: Job, entries: Mapping[str, Entry]) -> Iterator[str]:
        """Build the job's image and yield the builder's lines. Raises BuildFailed."""
        with tempfile.TemporaryDirectory(prefix="clipship-") as name:
            write_folder(entries, Path(name) / "context")
            yield from self._follow(self.command(job, Path("context"), self.base_now(job)), name)

    def base_now(self, job: Job) -> dict[str, str]:
        """Returns the arguments that hold a build to the base that the job's mirror has now; none without it.

        Raises ClusterError if the mirror does not have it.
        """
        if (name := mirrored_base(job)) is None:
            return {}
        try:
            digest = self.digest(name, job.image.platform)
        except ClusterError as problem:
            raise ClusterError(f"image.mirrors.registry: {problem}") from None
        say(f"base {job.image.base}: {name}, {digest}")
        return {"BASE": f"{name.partition('@')[0]}@{digest}", "BASE_DIGEST": digest}

    def command(self, job: Job, folder: Path, base: Mapping[str, str] | None = None) -> list[str]:
        """Returns the command that builds the job's image from a folder that `write_folder` filled.

        `base` are the arguments that hold it to an image of its mirror.
        """
        built = revision()
        arguments = {"REVISION": built, **(base or {})}
        tag = [f"--tag={job.image.tag}"] if job.image.tag else []
        secrets = [f"--secret={self.secret(name, path)}" for name, path in job.image.site.secrets.items()]
        platform = f"--platform={job.image.platform}"
        return [
            *self.words,
            platform,
            *tag,
            *(f"--build-arg={name}={value}" for name, value in arguments.items()),
            *secrets,
            *self.options(built),
            str(folder),
        ]

    def attesting(self, options: Sequence[str]) -> "Builder":
        """Returns a builder of this kind that takes BuildKit's options to attach statements about a build.

        Raises InputError if there is none.
        """
        raise InputError(
            f"--sbom and --provenance are BuildKit's, and {self.name} builds this image: add --set "
            "image.builder=buildkit, or leave them out"
        )

    def options(self, built: str) -> list[str]:
        """Returns more options of the command that builds, given the revision of the code."""
        return []

    def secret(self, name: str, path: str) -> str:
        """Returns the option's value for a secret, as BuildKit reads it, whatever is in the path."""
        with io.StringIO() as line:
            csv.writer(line, lineterminator="").writerow((f"id={name}", f"src={path}"))
            return line.getvalue()

    def _follow(self, command: Sequence[str], folder: str) -> Iterator[str]:
        with subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "DOCKER_BUILDKIT": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            yield from process.stdout
        if process.returncode != 0:
            raise BuildFailed(f"{' '.join(self.words)} ended with exit code {process.returncode}")
