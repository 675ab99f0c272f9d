"""Builds images and keeps, runs and exports them, by docker, podman or buildah. Imports no torch.

The programs share most commands; a row for each has the words in which it differs, and what only it does.
podman and buildah share a storage of each user's own. Both put localhost/ before a name without a registry,
and find it by the short name too.

The Docker SDK is asked where the docker command has no good answer: whether a daemon answers, and why not,
for the SDK's errors have kinds where the command prints lines; and the digest that a registry has, for which
the command would pull the image. All else is the command's: it follows contexts and `docker login` by itself.
The likely cause of a failed build is found in the output of its failing step: build_errors.toml.
"""

import csv
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainer.config import Job
from trainer.config.image import Image
from trainer.config.image_name import bare_name, full_name, registry_host
from trainer.errors import ClusterError, InputError
from trainer.image.base import mirrored_base
from trainer.image.context import Entry, write_folder
from trainer.image.source import revision
from trainer.safe_io.plain import parse_json, read_json
from trainer.sysinfo.addresses import is_loopback
from trainer.sysinfo.own_table import own_table
from trainer.text.terminal import say, shown

_STEP = re.compile(r"^(?:Step \d+/\d+ : |#\d+ \[| > \[|(?:\[\d+/\d+\] )?STEP \d+/\d+: )", re.MULTILINE)
"""First line of a step, as printed by the classic builder, by BuildKit, in BuildKit's excerpt of the failed
step, or by podman and buildah."""
LAST_LINES = 25
"""Lines of an output that an error repeats."""


def explained(last: Iterable[str]) -> str:
    """Returns the last lines of what failed, and behind them the likely cause if it is known."""
    output = "\n".join(last)
    cause = likely_cause(output)
    return f"{output}\nlikely cause: {cause}" if cause else output


def likely_cause(output: str) -> str | None:
    """Returns the likely cause from the output of the last step, which failed.

    Returns None if nothing in it is known.
    """
    begin = max((match.start() for match in _STEP.finditer(output)), default=0)
    for row in own_table(__file__, "build_errors.toml")["causes"]:
        for pattern in row["patterns"]:
            if matches := list(re.finditer(pattern, output[begin:])):
                return matches[-1].expand(row["cause"])
    return None


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


LOCAL = "http+docker://localhost"
"""Address that the SDK reports for a daemon behind a socket of this machine."""


def client() -> Any:
    """Returns a docker.DockerClient whose daemon, that of the docker command, has answered.

    Raises ClusterError if there is no daemon, InputError if the SDK is not installed.
    """
    try:
        # `import docker` would also find a folder docker/ on sys.path, which has no module client
        from docker.client import from_env
        from docker.context import ContextAPI
        from docker.errors import DockerException
    except ImportError:
        raise InputError(
            "the Docker SDK for Python is not installed: pip install 'clipship[launch]'"
        ) from None

    name = os.environ.get("DOCKER_CONTEXT")
    try:
        # For a context that is not there the SDK would take the default one.
        known = os.environ.get("DOCKER_HOST") or ContextAPI.get_context(name)
        connected = from_env(use_ssh_client=True) if known else None
    except Exception as problem:
        said = str(problem)
        if not isinstance(problem, DockerException):  # the SDK reads the configuration without a look
            folder = os.environ.get("DOCKER_CONFIG", "~/.docker")
            said = f"{type(problem).__name__}: {said}; config.json or contexts/ in {folder} may be damaged"
        raise ClusterError(_unreachable(said)) from None
    if connected is None:
        raise ClusterError(
            f"there is no Docker context {name or 'as the configuration names it'}: `docker context ls` "
            "lists them"
        )
    return connected


def _unreachable(problem: str) -> str:
    if "Permission denied" in problem:
        return "the Docker daemon refuses this user: join the group docker (newgrp docker), or run as root"
    if shutil.which("dockerd") is None and shutil.which("docker") is None:
        return (
            "Docker is not installed: on Debian and Ubuntu, apt-get install docker.io; elsewhere "
            "docs.docker.com/engine/install"
        )
    return (
        "the Docker daemon does not answer: start it (systemctl start docker, or dockerd), or set "
        f"DOCKER_HOST. It said: {problem}"
    )


def digest_at_registry(name: str, advice: str) -> str:
    """Returns the digest that a registry has under the name now.

    Raises ClusterError, with the advice, if the daemon cannot ask it.
    """
    connected = client()
    from docker.credentials.errors import StoreError
    from docker.errors import DockerException

    try:
        return str(connected.images.get_registry_data(name).id)
    except (DockerException, StoreError, OSError) as problem:  # the errors of requests are OSErrors
        said = getattr(problem, "explanation", None) or problem
        raise ClusterError(f"{name} cannot be asked for ({advice}): {said}") from None


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
