"""Builds images and keeps, runs and exports them by the commands that docker, podman and buildah share.

A row of `builders` has the words in which a program differs, and what only it does. Imports no torch.
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
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainer.config import Job
from trainer.config.image_name import bare_name, full_name
from trainer.errors import ClusterError, InputError
from trainer.image.base import mirrored_base
from trainer.image.build_errors import LAST_LINES, explained
from trainer.image.context import Entry, write_folder
from trainer.image.source import revision
from trainer.safe_io.plain import parse_json
from trainer.text.terminal import say, shown

_SHARED_MEMORY = 2**30
"""Bytes of a container's /dev/shm, through which ranks communicate; the usual 64 MiB are too few."""
_CONTAINER = ("--pull=never", "--network=none", f"--shm-size={_SHARED_MEMORY}")
_CHUNK = 2**20
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ABSENT = re.compile("image not known|no such image", re.IGNORECASE)


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
    """First words of the command that builds; the very first is the program."""
    package: ClassVar[str]
    """The program's source, as a clause."""
    prune: ClassVar[str]
    """Command that makes room where its images lie."""
    root: ClassVar[str]
    """Template by which its `info` prints the folder with its images."""
    about: ClassVar[tuple[str, ...]] = ("image", "inspect")
    """Words that print what is known of an image."""
    create: ClassVar[tuple[str, ...]] = ("create", "--entrypoint=")
    """Words that make a container and print its id."""
    remove: ClassVar[tuple[str, ...]] = ("rm", "--force", "--volumes")
    unsaid: ClassVar[tuple[str, ...]] = ()
    """Lines of a build that are not shown: advice that nobody who runs Clipship could follow."""

    @abstractmethod
    def digest(self, name: str, platform: str) -> str:
        """Returns the digest that a registry has under the name now."""

    @abstractmethod
    def push(self, job: Job, tag: str) -> str:
        """Send the image to the registry in its name; returns its digest there."""

    def folder(self) -> str | None:
        """Returns the folder with its images; None if that is not on this machine."""
        return self._said("info", f"--format={self.root}")

    def stored(self, image: str) -> Stored:
        """Returns the image of that name or id. Raises ClusterError if there is none."""
        answer = self._ask(*self.about, image)
        if answer.returncode == 0:
            return self.described(parse_json(answer.stdout))
        if not _ABSENT.search(answer.stderr):
            raise ClusterError(f"{self.program}: {answer.stderr.strip()}")
        raise ClusterError(
            f"there is no image {image} on this machine: build or pull it with {self.program}, whose command "
            "`images` lists those that are here"
        )

    def described(self, about: Any) -> Stored:
        """Returns the image of an answer to `about`."""
        (found,) = about
        identity = f"sha256:{found['Id'].removeprefix('sha256:')}"
        return Stored(identity, tuple(found.get("RepoDigests") or ()), found["Config"], int(found["Size"]))

    def own_digest(self, name: str) -> str:
        """Returns the digest that an image here has at the registry in its name; "" if it is not known."""
        digests = [tuple(each.split("@", 1)) for each in self.stored(name).names]
        fitting = [digest for other, digest in digests if full_name(other) == full_name(bare_name(name))]
        if not fitting and len({other for other, _ in digests}) == 1:
            fitting = [digests[0][1]]  # a short name may be another registry's here
        return next(iter(fitting), "")

    def run(self, image: str, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Run a command in a container of the image, without a network; the container is then removed."""
        with self._container(image, *command) as container:
            return self._ask("start", "--attach", container)

    @contextmanager
    def export(self, image: str, files: bytes) -> Iterator[Iterator[bytes]]:
        """Yields the chunks of a tar of the image's files, and of those of another tar above them."""
        with self._container(image, "true") as container:
            with tempfile.TemporaryDirectory(prefix="clipship-") as folder:  # podman 4.3 leaves a copy there
                self._said("cp", "-", f"{container}:/", stdin=files, TMPDIR=folder)
            # Closed first: to remove a container podman waits for its export, and that for a reader.
            with closing(self._chunks(self.program, "export", container)) as chunks:
                yield chunks

    def build(self, job: Job, entries: Mapping[str, Entry], attest: Sequence[str] = ()) -> None:
        """Build the job's image; `attest` are BuildKit's options to attach statements about the build."""
        with tempfile.TemporaryDirectory(prefix="clipship-") as name:
            write_folder(entries, Path(name) / "context")
            self._follow([*self.command(job, Path("context"), self.base_now(job)), *attest], name)

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
        return [
            *self.words,
            f"--platform={job.image.platform}",
            *tag,
            *(f"--build-arg={name}={value}" for name, value in arguments.items()),
            *secrets,
            *self.options(built),
            str(folder),
        ]

    def options(self, built: str) -> list[str]:
        """Returns more options of the command that builds, given the revision of the code."""
        return []

    def secret(self, name: str, path: str) -> str:
        """Returns the option's value for a secret, as BuildKit reads it, whatever is in the path."""
        with io.StringIO() as line:
            csv.writer(line, lineterminator="").writerow((f"id={name}", f"src={path}"))
            return line.getvalue()

    @property
    def program(self) -> str:
        return self.words[0]

    def _follow(self, command: Sequence[str], folder: str, **variables: str) -> None:
        """Run a command in the folder and print its lines.

        If it fails, raises ClusterError with the last lines and the likely cause.
        """
        last: deque[str] = deque(maxlen=LAST_LINES)
        with subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if (clean := _COLOUR.sub("", line).rstrip()) and clean.strip() not in self.unsaid:
                    last.append(clean)
                    print(shown(clean), file=sys.stderr, flush=True)
        if process.returncode:
            raise ClusterError(
                f"the build failed: {' '.join(self.words)} ended with exit code {process.returncode}\n"
                f"its last lines:\n{explained(last)}"
            )

    @contextmanager
    def _container(self, image: str, *command: str) -> Iterator[str]:
        container = self._said(*self.create, *_CONTAINER, image, *command)
        try:
            yield container
        finally:
            self._ask(*self.remove, container)

    def _ask(self, *words: str, stdin: bytes = b"", **variables: str) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, **variables}
        try:
            done = subprocess.run([self.program, *words], input=stdin, capture_output=True, env=environment)
        except FileNotFoundError:
            raise InputError(f"{self.program} is not installed: {self.package}") from None
        output, errors = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(done.args, done.returncode, output, errors)

    def _said(self, *words: str, stdin: bytes = b"", **variables: str) -> str:
        answer = self._ask(*words, stdin=stdin, **variables)
        if answer.returncode:
            raise ClusterError(f"{self.program} {words[0]}: {answer.stderr.strip()}")
        return answer.stdout.strip()

    def _chunks(self, *command: str) -> Generator[bytes]:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            while chunk := process.stdout.read(_CHUNK):
                yield chunk
        if process.returncode:
            raise ClusterError(
                f"{command[0]} ended with exit code {process.returncode} while it exported an image; it says "
                "why above"
            )
