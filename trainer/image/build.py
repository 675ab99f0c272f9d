"""Builds a job's image, with the SDK and the classic builder or with BuildKit, and pushes it.

BuildKit is used if the job asks for it or if a secret needs it. A push returns the digest under which the
image cannot change later.
"""

import csv
import io
import os
import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.config import Job
from trainer.errors import ClusterError, InputError
from trainer.image.build_errors import likely_cause
from trainer.image.context import Entry, check_files, context, write_folder, write_tar
from trainer.image.daemon import buildkit_command, check_disk, daemon
from trainer.image.source import ROOT, by_git
from trainer.text.terminal import shown

_LAST_LINES = 25
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def build(job: Job, *, any_disk: bool = False) -> str:
    """Build the job's image, tag it and return its id; output goes to stderr.

    Raises ClusterError if the daemon or the build fails, InputError if the job cannot be built.
    """
    if job.image.tag is None:
        raise InputError(
            "image.tag: missing; it names the image that is built, as registry.example/team/clipship:1"
        )
    if "@" in job.image.tag:
        raise InputError(
            f"image.tag: {job.image.tag} is a digest, which a build cannot choose; give a name: --set "
            "image.tag=NAME:TAG"
        )
    check_files(job.image.site)
    entries = context(job)
    with daemon("the build") as connected:
        if not any_disk:
            check_disk(connected)
        buildkit = job.image.builder == "buildkit" or bool(job.image.site.secrets)
        _follow(_with_buildkit(job, entries) if buildkit else _with_sdk(connected, job, entries))
        return _image_id(connected, job.image.tag)


def _image_id(connected: Any, tag: str) -> str:
    from docker.errors import ImageNotFound

    try:
        return str(connected.images.get(tag).id)
    except ImageNotFound:
        raise ClusterError(
            f"the builder reported no error, but the daemon has no image {tag}: a builder of buildx may keep "
            "its images to itself; `docker buildx use default` selects the daemon's own builder"
        ) from None


def revision() -> str:
    """Returns the checkout's commit, with a plus if files differ; "unknown" if git cannot tell."""
    if not by_git():
        return "unknown"
    described = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _follow(lines: Iterator[str]) -> None:
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
    except _Failed as problem:
        output = "\n".join(last)
        cause = likely_cause(f"{output}\n{problem}")
        hint = f"\nlikely cause: {cause}" if cause else ""
        raise ClusterError(f"the build failed: {problem}\nits last lines:\n{output}{hint}") from None


class _Failed(Exception):
    """The build failed; the text is the builder's own."""


def _with_sdk(connected: Any, job: Job, entries: dict[str, Entry]) -> Iterator[str]:
    from docker.credentials.errors import StoreError
    from docker.errors import DockerException

    with tempfile.TemporaryFile() as file:
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
                buildargs={"REVISION": revision()},
                platform=job.image.platform,
            )
            for message in answer:
                if "error" in message:
                    raise _Failed(message["error"].strip())
                yield from str(message.get("stream", "")).splitlines()
        except (DockerException, StoreError, OSError) as problem:
            raise _Failed(str(problem)) from None


def _with_buildkit(job: Job, entries: dict[str, Entry]) -> Iterator[str]:
    command = buildkit_command()
    with tempfile.TemporaryDirectory(prefix="clipship-") as name:
        write_folder(entries, Path(name) / "context")
        _, *arguments = build_command(job, Path("context"))
        environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
        with subprocess.Popen(
            [command, *arguments, "--progress=plain"],
            cwd=name,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            yield from process.stdout
        if process.returncode != 0:
            raise _Failed(f"docker build ended with exit code {process.returncode}")


def build_command(job: Job, folder: Path) -> list[str]:
    """Returns the command that builds the job's image from a folder that `write_folder` filled."""
    tag = [f"--tag={job.image.tag}"] if job.image.tag else []
    secrets = [
        f"--secret={_csv(f'id={secret}', f'src={path}')}" for secret, path in job.image.site.secrets.items()
    ]
    platform = f"--platform={job.image.platform}"
    return ["docker", "build", platform, *tag, f"--build-arg=REVISION={revision()}", *secrets, str(folder)]


def _csv(*fields: str) -> str:
    """Returns the fields as BuildKit's options read them: a path may contain commas and quotes."""
    with io.StringIO() as line:
        csv.writer(line, lineterminator="").writerow(fields)
        return line.getvalue()


def push(tag: str) -> str:
    """Push the image; returns its full name with its digest, name@sha256:...

    Raises InputError for a name with a digest, ClusterError if the registry or the daemon refuses.
    """
    if "@" in tag:
        raise InputError(
            f"image.tag: {tag} is a digest, so this image has already been pushed; give a name: --set "
            "image.tag=NAME:TAG"
        )
    name, _, version = tag.rpartition(":") if ":" in tag.rpartition("/")[2] else (tag, "", "latest")
    digest = ""
    with daemon(f"{tag} was not pushed ({_ADVICE})") as connected:
        for message in connected.api.push(name, tag=version, stream=True, decode=True):
            if "error" in message:
                raise ClusterError(f"{tag} was not pushed: {message['error']}. {_ADVICE}")
            digest = message.get("aux", {}).get("Digest", digest)
    if not digest:
        raise ClusterError(f"{tag} was pushed, but the registry returned no digest")
    return f"{name}@{digest}"


_ADVICE = (
    "`docker login HOST` stores a password for a registry; a registry without TLS must be in the daemon's "
    "insecure-registries"
)
