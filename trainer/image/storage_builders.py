"""The rows of `builders` that need no daemon: podman and buildah, which share a storage of each user's own.

Both put localhost/ before a name without a registry, and find it by the short name too. Imports no torch.
"""

import os
import subprocess
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from trainer.config import Job
from trainer.config.image_name import full_name, name_and_version, registry_host
from trainer.errors import ClusterError, InputError
from trainer.image.builder import SHARED_MEMORY, Builder, Stored
from trainer.safe_io.plain import parse_json
from trainer.sysinfo.addresses import is_loopback
from trainer.text.terminal import say

_CHUNK = 2**20
_CONTAINER = ("--pull=never", "--network=none")


def _registry_options(name: str) -> list[str]:
    """Returns the options for the registry in a name: Docker too asks one on this machine without TLS."""
    return ["--tls-verify=false"] if is_loopback(registry_host(name)) else []


class Podman(Builder):
    """podman, for root or for an ordinary user."""

    name = "podman"
    words: ClassVar[tuple[str, ...]] = ("podman", "build")
    prune = "podman system prune"
    about: ClassVar[tuple[str, ...]] = ("image", "inspect")
    root: ClassVar[str] = "{{.Store.GraphRoot}}"

    def options(self, built: str) -> list[str]:
        """Returns a label of the build's own: cached steps keep the ARG of an earlier build."""
        return [f"--label=org.opencontainers.image.revision={built}"]

    def folder(self) -> str | None:
        return self._said("info", f"--format={self.root}")

    def stored(self, image: str) -> Stored:
        answer = self._ask(*self.about, image)
        if answer.returncode:
            if "image not known" not in answer.stderr:
                raise ClusterError(f"{self.name}: {answer.stderr.strip()}")
            raise ClusterError(
                f"there is no image {image} on this machine: build or pull it with {self.name}"
            )
        return self.described(parse_json(answer.stdout))

    def described(self, about: Any) -> Stored:
        """Returns the image of an answer to `about`."""
        (found,) = about
        names = tuple(found.get("RepoDigests") or ())
        return Stored(f"sha256:{found['Id']}", names, found["Config"], int(found["Size"]))

    def run(self, image: str, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        options = ("--rm", f"--shm-size={SHARED_MEMORY}", "--entrypoint=")
        return self._ask("run", *_CONTAINER, *options, image, *command)

    @contextmanager
    def export(self, image: str, files: bytes) -> Iterator[Iterator[bytes]]:
        container = self._said("create", *_CONTAINER, "--entrypoint=", image, "true")
        try:
            with tempfile.TemporaryDirectory(prefix="clipship-") as folder:  # podman 4.3 leaves a copy there
                self._said("cp", "-", f"{container}:/", stdin=files, TMPDIR=folder)
            # Closed first: to remove a container podman waits for its export, and that for a reader.
            with closing(self._chunks(self.name, "export", container)) as chunks:
                yield chunks
        finally:
            self._ask("rm", "--force", container)

    def digest(self, name: str, platform: str) -> str:
        """Pull the image, which the build does anyway, and return its digest at the registry in its name."""
        self._said("pull", "--quiet", f"--platform={platform}", *_registry_options(name), name)
        wanted = full_name(name_and_version(name.partition("@")[0])[0])
        digests = [tuple(each.split("@", 1)) for each in self.stored(name).names]
        if len({other for other, _ in digests}) == 1:  # a short name may be another registry's here
            return digests[0][1]
        for other, digest in digests:
            if full_name(other) == wanted:
                return digest
        raise ClusterError(
            f"{self.name} pulled {name} and has no digest of it at {wanted}: give its full name, with the "
            "registry"
        )

    def push(self, job: Job, tag: str) -> str:
        form = job.image.compression
        with tempfile.TemporaryDirectory(prefix="clipship-") as folder:
            file = Path(folder) / "digest"
            options = [f"--digestfile={file}", *self._compression(form), *_registry_options(tag)]
            words = [self.name, "push", *options, tag, f"docker://{full_name(tag)}"]
            if subprocess.run(words, stdin=subprocess.DEVNULL, stdout=2).returncode:
                raise ClusterError(
                    f"{tag} was not pushed; {self.name} says why above. `{self.name} login HOST` stores a "
                    "password for a registry."
                )
            return file.read_text().strip()

    def _compression(self, form: str) -> list[str]:
        if form == "gzip":
            return []
        if "--force-compression" in self._ask("push", "--help").stdout:
            return [f"--compression-format={form}", "--force-compression"]
        say(f"this {self.name} lets a layer that the registry has in another form than {form} stay so")
        return [f"--compression-format={form}"]

    def secret(self, name: str, path: str) -> str:
        if "," in path:
            raise InputError(
                f"image.site.{name}: {path} has a comma, which {self.name} takes for the end of the name: "
                "rename the file, or name a link to it"
            )
        return f"id={name},src={path}"

    def _ask(self, *words: str, stdin: bytes = b"", **variables: str) -> "subprocess.CompletedProcess[str]":
        try:
            done = subprocess.run(
                [self.name, *words], input=stdin, capture_output=True, env={**os.environ, **variables}
            )
        except FileNotFoundError:
            raise InputError(
                f"{self.name} is not installed: Debian, Ubuntu and Fedora have it as package {self.name}"
            ) from None
        output, errors = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(done.args, done.returncode, output, errors)

    def _said(self, *words: str, stdin: bytes = b"", **variables: str) -> str:
        answer = self._ask(*words, stdin=stdin, **variables)
        if answer.returncode:
            raise ClusterError(f"{self.name} {words[0]}: {answer.stderr.strip()}")
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


class Buildah(Podman):
    """buildah, for where podman is not: in a pod or a CI job."""

    name = "buildah"
    words = ("buildah", "build", "--layers", "--force-rm")  # as podman has them by default
    prune = "buildah prune"
    about = ("inspect", "--type=image")
    root = "{{.store.GraphRoot}}"

    def described(self, about: Any) -> Stored:
        bare, _ = name_and_version(about["FromImage"].partition("@")[0])
        name = f"{bare}@{about['FromImageDigest']}"
        return Stored(f"sha256:{about['FromImageID']}", (name,), about["Docker"]["config"], 0)

    def run(self, image: str, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        with self._container(image) as container:
            return self._ask("run", container, "--", *command)

    @contextmanager
    def export(self, image: str, files: bytes) -> Iterator[Iterator[bytes]]:
        with self._container(image) as container, tempfile.NamedTemporaryFile(suffix=".tar") as added:
            added.write(files)
            added.flush()
            self._said("add", container, added.name, "/")
            # An ordinary user sees the files only in the user namespace in which they are mounted.
            inside = ["buildah", "unshare"] if os.geteuid() else []
            script = 'cd "$(buildah mount "$1")" && exec tar -c .'
            with closing(self._chunks(*inside, "sh", "-c", script, "sh", container)) as chunks:
                yield chunks

    @contextmanager
    def _container(self, image: str) -> Iterator[str]:
        container = self._said("from", *_CONTAINER, f"--shm-size={SHARED_MEMORY}", image)
        try:
            yield container
        finally:
            self._ask("rm", container)
