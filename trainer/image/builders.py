"""The programs that build images, a row for each, and the choice among them. Imports no torch.

Each does its deeds by its own command; `daemon` says what Docker's command is not asked. podman and buildah
share a storage of each user's own. Both put localhost/ before a name without a registry, and find it by the
short name too.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from trainer.config import Job
from trainer.config.image import Image
from trainer.config.image_name import bare_name, full_name, registry_host
from trainer.errors import ClusterError, InputError
from trainer.image.builder import Builder, Stored
from trainer.image.context import Entry
from trainer.image.daemon import LOCAL, client, digest_at_registry
from trainer.safe_io.plain import parse_json, read_json
from trainer.sysinfo.addresses import is_loopback
from trainer.text.terminal import say

_ADVICE = (
    "`docker login HOST` stores a password for a registry; a registry without TLS must be in the daemon's "
    "insecure-registries"
)
_FILES_OF_ESTARGZ = "containerd.io/snapshot/stargz/toc.digest"
"""Annotation of a layer that names its list of files."""


class _Docker(Builder):
    words = ("docker", "build")
    package = "Debian and Ubuntu have the command docker as package docker-cli, older ones in docker.io"
    prune = "docker system prune"
    root = "{{.DockerRootDir}}"

    def folder(self) -> str | None:
        here = client().api.base_url == LOCAL
        self._check_command()  # says if there is no docker command
        folder = super().folder()
        return folder if here else None

    def stored(self, image: str) -> Stored:
        client().close()  # says why no daemon answers
        self._check_command()
        return super().stored(image)

    def _check_command(self) -> None:
        """Raises ClusterError for podman under Docker's name, which tells no digest that it has pushed."""
        if self._said("--version").startswith("podman"):
            raise ClusterError(
                'the command docker is podman here: use it as such, by image.builder = "podman"'
            )

    def digest(self, name: str, platform: str) -> str:
        return digest_at_registry(name, _ADVICE)

    def push(self, job: Job, tag: str) -> str:
        pushed = self._ask("push", tag)
        if pushed.returncode:
            raise ClusterError(f"{tag} was not pushed ({_ADVICE}): {pushed.stderr.strip()}")
        if told := re.search(r"\bdigest: (sha256:[0-9a-f]{64})\b", pushed.stdout):
            return told[1]
        return self.own_digest(tag)  # a daemon with containerd's store may not tell it


class Classic(_Docker):
    """The builder of every Docker daemon, which keeps all that a step says: secrets are refused."""

    name = "classic"
    unsaid = (
        "BuildKit is currently disabled; enable it by removing the DOCKER_BUILDKIT=0",
        "environment-variable.",
    )

    def _follow(self, command: Sequence[str], folder: str, **variables: str) -> None:
        super()._follow([*command, "--force-rm"], folder, DOCKER_BUILDKIT="0")


class Buildkit(_Docker):
    """BuildKit, by a docker command that has it; the daemon keeps the image."""

    name = "buildkit"

    def build(self, job: Job, entries: Mapping[str, Entry], attest: Sequence[str] = ()) -> None:
        super().build(job, entries, attest)
        try:
            self.stored(job.image.tag or "")
        except ClusterError as problem:
            raise ClusterError(
                f"the builder reported no error, but {problem}; a builder of buildx may keep its images to "
                "itself: `docker buildx use default` selects the daemon's own builder"
            ) from None

    def push(self, job: Job, tag: str) -> str:
        """Send the image; buildx sends layers in another form than gzip, by a build whose one step is it."""
        form = job.image.compression
        if form == "gzip":
            return super().push(job, tag)
        output = f"type=image,push=true,oci-mediatypes=true,compression={form},force-compression=true"
        options = (f"--platform={job.image.platform}", f"--tag={tag}", f"--output={output}")
        words = [*self.words, *options, "--provenance=false", "--metadata-file=metadata.json", "."]
        with tempfile.TemporaryDirectory(prefix="clipship-") as folder:
            (Path(folder) / "Dockerfile").write_text(f"FROM {tag}\n")
            try:
                self._follow(words, folder)
            except ClusterError as problem:
                raise ClusterError(f"{tag} was not pushed ({_ADVICE}): {problem}") from None
            told = read_json(Path(folder) / "metadata.json")
        digest = str(told.get("containerimage.digest", ""))
        if not self._is_pushed_as(form, f"{bare_name(tag)}@{digest}"):
            raise ClusterError(
                f"{tag} was pushed, but its layers are not all {form}: for that Docker must keep images as "
                'containerd does, with {"features": {"containerd-snapshotter": true}} in '
                "/etc/docker/daemon.json; new installations of Docker 29 do. gzip needs nothing, and podman "
                "and buildah have zstd, too"
            )
        return digest

    def _is_pushed_as(self, form: str, name: str) -> bool:
        words = [_buildkit_command(), "buildx", "imagetools", "inspect", "--raw", name]
        read = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if read.returncode:
            raise ClusterError(f"{name} was pushed, but cannot be read back: {read.stderr.strip()}")
        layers = parse_json(read.stdout)["layers"]
        if form == "estargz":
            return all(_FILES_OF_ESTARGZ in layer.get("annotations", {}) for layer in layers)
        return all(layer["mediaType"].endswith(f"+{form}") for layer in layers)

    def _follow(self, command: Sequence[str], folder: str, **variables: str) -> None:
        words = [_buildkit_command(), *command[1:], "--progress=plain"]
        super()._follow(words, folder, DOCKER_BUILDKIT="1")


def _buildkit_command() -> str:
    """Returns the first docker command on PATH that can use BuildKit.

    It has the plugin buildx, or is older than that plugin. Raises ClusterError if there is none.
    """
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        if command := shutil.which("docker", path=folder):
            words, asked = [command, "build", "--help"], {**os.environ, "DOCKER_BUILDKIT": "1"}
            if "--progress" in subprocess.run(words, env=asked, capture_output=True, text=True).stdout:
                return command
    raise ClusterError(
        f"{shutil.which('docker')} lacks the plugin buildx, which BuildKit needs: install docker-buildx"
    )


def _registry_options(name: str) -> list[str]:
    """Returns the options for the registry in a name: Docker too asks one on this machine without TLS."""
    return ["--tls-verify=false"] if is_loopback(registry_host(name)) else []


class Podman(Builder):
    """podman, for root or for an ordinary user."""

    name = "podman"
    words: ClassVar[tuple[str, ...]] = ("podman", "build")
    package: ClassVar[str] = "Debian, Ubuntu and Fedora have it as package podman"
    prune = "podman system prune"
    root = "{{.Store.GraphRoot}}"

    def options(self, built: str) -> list[str]:
        """Returns a label of the build's own: cached steps keep the ARG of an earlier build."""
        return [f"--label=org.opencontainers.image.revision={built}"]

    def digest(self, name: str, platform: str) -> str:
        """Pull the image, which the build does anyway, and return its digest at the registry in its name."""
        self._said("pull", "--quiet", f"--platform={platform}", *_registry_options(name), name)
        if digest := self.own_digest(name):
            return digest
        wanted = full_name(bare_name(name))
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


class Buildah(Podman):
    """buildah, for where podman is not: in a pod or a CI job."""

    name = "buildah"
    words = ("buildah", "build", "--layers", "--force-rm")  # as podman has them by default
    package = "Debian, Ubuntu and Fedora have it as package buildah"
    prune = "buildah prune"
    root = "{{.store.GraphRoot}}"
    about = ("inspect", "--type=image")
    create = ("from",)
    remove = ("rm",)

    def described(self, about: Any) -> Stored:
        name = f"{bare_name(about['FromImage'])}@{about['FromImageDigest']}"
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


BUILDERS: dict[str, Builder] = {row.name: row for row in (Classic(), Buildkit(), Podman(), Buildah())}
AUTO = "auto"


def builder_of(image: Image) -> Builder:
    """Returns the builder that a job names, without a look at what is installed; auto: one of Docker's."""
    return BUILDERS[
        image.builder if image.builder != AUTO else "buildkit" if image.site.secrets else "classic"
    ]


def builder_here(image: Image) -> Builder:
    """Returns the builder that builds a job's image here.

    auto: podman or buildah where no Docker daemon answers, which a line says. Raises ClusterError or
    InputError, if none is here.
    """
    if image.builder != AUTO:
        return builder_of(image)
    try:
        client().close()
    except (ClusterError, InputError) as problem:
        if not (others := _without_daemon()):
            raise
        say(f'{problem}; {others[0].name} takes its place, as with image.builder = "{others[0].name}"')
        return others[0]
    return builder_of(image)


def found(image: str, name: str = AUTO) -> tuple[Builder, Stored]:
    """Returns who has an image on this machine, and what it is.

    auto: the Docker daemon, else podman or buildah, which a line says. Raises ClusterError or InputError.
    """
    if name != AUTO:
        return BUILDERS[name], BUILDERS[name].stored(image)
    docker = BUILDERS["classic"]
    try:
        return docker, docker.stored(image)
    except (ClusterError, InputError) as problem:
        for other in _without_daemon():
            try:
                stored = other.stored(image)
            except ClusterError:
                continue
            say(f"{problem}; {other.name} has {image}")
            return other, stored
        raise


def _without_daemon() -> list[Builder]:
    """Returns podman and buildah, if they are installed; none if the user names a Docker daemon."""
    if os.environ.get("DOCKER_HOST") or os.environ.get("DOCKER_CONTEXT"):
        return []
    return [BUILDERS[name] for name in ("podman", "buildah") if shutil.which(name)]
