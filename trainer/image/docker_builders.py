"""The rows of `builders` that build with a Docker daemon: its classic builder, and BuildKit.

Uses the Docker SDK; imports no torch.
"""

import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainer.config import Job
from trainer.config.image_name import full_name, name_and_version
from trainer.errors import ClusterError
from trainer.image.builder import SHARED_MEMORY, Builder, BuildFailed, Stored, follow
from trainer.image.context import Entry, write_tar
from trainer.image.daemon import buildkit_command, daemon, disk_of, stored_image
from trainer.image.source import revision
from trainer.safe_io.plain import parse_json, read_json

_ADVICE = (
    "`docker login HOST` stores a password for a registry; a registry without TLS must be in the daemon's "
    "insecure-registries"
)
_FILES_OF_ESTARGZ = "containerd.io/snapshot/stargz/toc.digest"
"""Annotation of a layer that names its list of files."""


class Classic(Builder):
    """The builder of every Docker daemon, which keeps all that a step says: secrets are refused."""

    name = "classic"
    words = ("docker", "build")
    prune = "docker system prune"

    def folder(self) -> str | None:
        with daemon("the build") as connected:
            return disk_of(connected)

    def stored(self, image: str) -> Stored:
        with daemon(image) as connected:
            found = stored_image(connected, image)
            about = found.attrs
        names = tuple(about.get("RepoDigests") or ())
        return Stored(found.id, names, about["Config"], int(about["Size"]))

    def run(self, image: str, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        with daemon(image) as connected:
            container = connected.containers.create(
                image, list(command), entrypoint="", network_mode="none", shm_size=SHARED_MEMORY
            )
            try:
                container.start()
                code = container.wait()["StatusCode"]
                output, errors = (
                    container.logs(stdout=out, stderr=not out).decode(errors="replace")
                    for out in (True, False)
                )
            finally:
                container.remove(force=True)
        return subprocess.CompletedProcess(command, code, output, errors)

    @contextmanager
    def export(self, image: str, files: bytes) -> Iterator[Iterator[bytes]]:
        with daemon(f"{image} was not exported") as connected:
            container = connected.containers.create(image, ["true"], entrypoint="", network_mode="none")
            try:
                container.put_archive("/", files)
                yield container.export()
            finally:
                container.remove(force=True)

    def digest(self, name: str, platform: str) -> str:
        with daemon(f"{name} cannot be asked for ({_ADVICE})") as connected:
            return str(connected.images.get_registry_data(name).id)

    def push(self, job: Job, tag: str) -> str:
        name, version = name_and_version(tag)
        digest = ""
        with daemon(f"{tag} was not pushed ({_ADVICE})") as connected:
            for message in connected.api.push(name, tag=version, stream=True, decode=True):
                if "error" in message:
                    raise ClusterError(f"{tag} was not pushed: {message['error']}. {_ADVICE}")
                digest = message.get("aux", {}).get("Digest", digest)
        return digest or self._digest_of(tag)

    def _digest_of(self, tag: str) -> str:
        """Returns the digest of a pushed image, which a daemon with containerd's store does not say."""
        name = full_name(name_and_version(tag)[0])
        digests = dict(each.split("@", 1) for each in self.stored(tag).names)
        return next((digest for other, digest in digests.items() if full_name(other) == name), "")

    def build(self, job: Job, entries: Mapping[str, Entry]) -> Iterator[str]:
        from docker.credentials.errors import StoreError
        from docker.errors import DockerException

        with daemon("the build") as connected, tempfile.TemporaryFile() as file:
            write_tar(entries, file)
            file.seek(0)
            try:
                answer = connected.api.build(
                    fileobj=file,
                    custom_context=True,
                    tag=job.image.tag,
                    rm=True,
                    forcerm=True,
                    decode=True,
                    buildargs={"REVISION": revision(), **self.base_now(job)},
                    platform=job.image.platform,
                )
                for message in answer:
                    if "error" in message:
                        raise BuildFailed(message["error"].strip())
                    yield from str(message.get("stream", "")).splitlines()
            except (DockerException, StoreError, OSError) as problem:
                raise BuildFailed(str(problem)) from None


class Buildkit(Classic):
    """BuildKit, by the docker command; the daemon keeps the image."""

    name = "buildkit"

    def __init__(self, attest: Sequence[str] = ()) -> None:
        self._attest = attest

    def attesting(self, options: Sequence[str]) -> Builder:
        return Buildkit(options)

    def options(self, built: str) -> list[str]:
        return list(self._attest)

    def build(self, job: Job, entries: Mapping[str, Entry]) -> Iterator[str]:
        yield from super(Classic, self).build(job, entries)
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
                follow(self._follow(words, folder))
            except ClusterError as problem:
                raise ClusterError(f"{tag} was not pushed ({_ADVICE}): {problem}") from None
            told = read_json(Path(folder) / "metadata.json")
        digest = str(told.get("containerimage.digest", ""))
        if not self._is_pushed_as(form, f"{name_and_version(tag)[0]}@{digest}"):
            raise ClusterError(
                f"{tag} was pushed, but its layers are not all {form}: for that Docker must keep images as "
                'containerd does, with {"features": {"containerd-snapshotter": true}} in '
                "/etc/docker/daemon.json; new installations of Docker 29 do. gzip needs nothing, and podman "
                "and buildah have zstd, too"
            )
        return digest

    def _is_pushed_as(self, form: str, name: str) -> bool:
        words = [buildkit_command(), "buildx", "imagetools", "inspect", "--raw", name]
        read = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if read.returncode:
            raise ClusterError(f"{name} was pushed, but cannot be read back: {read.stderr.strip()}")
        layers = parse_json(read.stdout)["layers"]
        if form == "estargz":
            return all(_FILES_OF_ESTARGZ in layer.get("annotations", {}) for layer in layers)
        return all(layer["mediaType"].endswith(f"+{form}") for layer in layers)

    def _follow(self, command: Sequence[str], folder: str) -> Iterator[str]:
        return super()._follow([buildkit_command(), *command[1:], "--progress=plain"], folder)
