"""Makes the squashfs file from which pyxis and enroot start a job's image, once for all nodes.

A builder on this machine gives the image to mksquashfs, or enroot takes it from its registry.
Imports no torch.
"""

import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config import Job
from trainer.config.image_name import for_enroot
from trainer.errors import ClusterError, InputError
from trainer.image.builder import Builder, Stored, found
from trainer.launch.commands import answer_of
from trainer.launch.slurm.image_file import file_in, path_of, record
from trainer.launch.templates import render
from trainer.safe_io.folders import whole_folder
from trainer.text.live import progress
from trainer.text.terminal import say

_COMPRESSION = ("-comp", "zstd", "-Xcompression-level", "3")
_AS_ENROOT = ("-all-root", "-root-mode", "755", "-no-xattrs", "-wildcards", "-e", "dev/*", ".dockerenv")
"""Options for a file that users without root can unpack, as those of `enroot import` are."""
_ARCH = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
"""Values of image.platform, as enroot calls them."""
_PACKAGE = "squashfs-tools 4.5 or newer (package squashfs-tools; Debian 12 and Ubuntu 22.04 have it)"
_ANSWER_S = 120.0
"""Longest that enroot may ask the image's registry for its digest."""
_FIRST_BYTES = 1000
"""Part of the errors of mksquashfs that is shown: all options follow one that it does not know."""


@dataclass(frozen=True)
class _Source:
    """An image that can be written as a squashfs file."""

    digests: tuple[str, ...]
    write: Callable[[Path], None]
    unpacked_bytes: int = 0
    """Size of the image; 0 if it is not known beforehand."""


def squash(job: Job, *, any_disk: bool = False) -> Path:
    """Make the file of the job's image in slurm.image_dir, unless it is there, and return its path.

    A file that cannot be read back is not kept. Raises InputError or ClusterError.
    """
    tag, image_dir = job.image.tag, Path(job.slurm.image_dir or "")
    if tag is None or job.slurm.image_dir is None or not image_dir.is_dir():
        raise InputError(
            f"a file is made of image.tag = {tag} in slurm.image_dir = {job.slurm.image_dir}: set both, the "
            "second to a folder that is there, on a file system that all nodes see"
        )
    if shutil.which("mksquashfs") is None:
        raise InputError(f"mksquashfs is not on PATH: install {_PACKAGE}")
    source = _source(job, tag)
    path = path_of(image_dir, tag, source.digests[0])
    made = file_in(path.parent)
    try:
        if made is None:
            _check_space(image_dir, 0 if any_disk else source.unpacked_bytes)
            _make(source, tag, path)
        else:
            record(path, (*made.tags, tag), (*made.digests, *source.digests))
            say("the file of this image is there already")
    except OSError as problem:
        raise ClusterError(f"{path} cannot be written: {problem.strerror}") from None
    return path


def _source(job: Job, tag: str) -> _Source:
    """Returns the image that a builder has on this machine; without that, the one in its registry."""
    try:
        return _in_builder(*found(tag, job.image.builder), tag)
    except (InputError, ClusterError) as problem:
        if shutil.which("enroot") is None:
            raise ClusterError(
                f"{problem}; or run this where enroot is installed, which takes the image from its registry"
            ) from None
        say(f"{problem}; enroot takes the image from its registry")
    return _in_registry(tag, _ARCH[job.image.platform])


def _in_builder(builder: Builder, stored: Stored, tag: str) -> _Source:
    digests = tuple(name.rpartition("@")[2] for name in (stored.id, *stored.names))
    return _Source(digests, partial(_export, builder, stored, tag), stored.size)


def _in_registry(tag: str, arch: str) -> _Source:
    """Returns the image as enroot imports it, by the digest that its registry has for the name now."""
    name, _, digest = tag.partition("@")
    if not digest:
        words = ("enroot", "digest", "--arch", arch, f"docker://{for_enroot(tag)}")
        try:
            answer = answer_of(*words, timeout=_ANSWER_S)
        except subprocess.TimeoutExpired:
            raise ClusterError(
                f"enroot digest {tag} has not ended after {_ANSWER_S:g} s: is its registry reached from here?"
            ) from None
        digest = answer.stdout.strip()
        if answer.returncode or not digest.startswith("sha256:"):
            raise ClusterError(
                f"enroot digest {tag}: {answer.stderr.strip()} (enroot 4.1 or newer is needed, or "
                "image.tag = NAME@sha256:..., as `clipship image push` prints it)"
            )
    bare = for_enroot(re.sub(r":[^/]*$", "", name))
    return _Source((digest,), partial(_import, f"docker://{bare}@{digest}", arch))


def _make(source: _Source, tag: str, path: Path) -> None:
    """Makes the file and its record, in a folder that is there once both are whole. Raises OSError.

    Of two commands that make it at once, the first one's folder stays.
    """
    with suppress(FileNotFoundError):
        shutil.rmtree(path.parent)  # what is there is not whole
    try:
        with whole_folder(path.parent) as folder:
            source.write(folder / path.name)
            _read_back(folder / path.name)
            record(folder / path.name, (tag,), source.digests)
    except OSError:
        if file_in(path.parent) is None:
            raise
        say("another command has made this file meanwhile")


def _check_space(folder: Path, needed: int) -> None:
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ClusterError(
            f"{folder} has {free / 1e9:.1f} GB free, and the image has {needed / 1e9:.1f} before it is "
            "compressed: make room, or continue at your own risk with --any-disk"
        )


def _export(builder: Builder, stored: Stored, tag: str, file: Path) -> None:
    """Write an image of a builder, out of a container of it that never runs."""
    with builder.export(stored.id, _files_for_enroot(tag, stored.config)) as chunks:
        _squash_stream(chunks, stored.size, file)


def _files_for_enroot(tag: str, config: Mapping[str, Any]) -> bytes:
    """Returns a tar with what enroot reads beside the image's files: variables, mounts, what to run."""
    volume = "${{ENROOT_ROOTFS}}{0} {0} none x-create=dir,bind,rw,nosuid,nodev\n"
    texts = {
        "etc/environment": "".join(f"{line}\n" for line in config.get("Env") or ()),
        "etc/fstab": "".join(map(volume.format, config.get("Volumes") or ())),
        "etc/rc": render("docker/enroot.rc.j2", tag=tag, image=config),
        "etc/rc.local": "",
    }
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for name, text in texts.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    return written.getvalue()


def _squash_stream(chunks: Iterable[bytes], size: int, file: Path) -> None:
    """Write the files of a tar, which comes in chunks, as squashfs.

    Raises ClusterError with the errors of mksquashfs.
    """
    command = ["mksquashfs", "-", str(file), "-tar", "-noappend", "-quiet", "-no-progress"]
    command += [*_COMPRESSION, *_AS_ENROOT]
    count = 0
    with tempfile.TemporaryFile() as said:
        with (
            progress("exporting the image", "exported", "byte") as done,
            suppress(BrokenPipeError),  # mksquashfs has ended, and says why
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=said) as process,
        ):
            assert process.stdin is not None
            for chunk in chunks:
                process.stdin.write(chunk)
                count += len(chunk)
                done(count, max(count, size))
        said.seek(0)
        if process.returncode:
            why = said.read(_FIRST_BYTES).decode(errors="replace").strip()
            raise ClusterError(
                f"mksquashfs ended with exit code {process.returncode} (needed is {_PACKAGE}):\n{why}"
            )


def _import(uri: str, arch: str, file: Path) -> None:
    """Let enroot import the image; what it says goes to stderr."""
    environment = {**os.environ, "ENROOT_SQUASH_OPTIONS": " ".join(_COMPRESSION)}
    command = ["enroot", "import", "--arch", arch, "--output", str(file), uri]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, env=environment)
    if done.returncode:
        raise ClusterError(f"enroot import {uri} ended with exit code {done.returncode}; it says why above")


def _read_back(path: Path) -> None:
    """Raises ClusterError if the list of files in the file cannot be read; then puts it onto the disk."""
    command = ["unsquashfs", "-l", str(path)]
    listed = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if listed.returncode:
        raise ClusterError(f"the file that was made cannot be read back: {listed.stderr.strip()}")
    with path.open("rb") as file:
        os.fsync(file.fileno())
