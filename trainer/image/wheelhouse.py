"""Fills a folder with every package that an image's build needs from an index.

The build then needs no index. Runs pip; imports no torch.
"""

import os
import shutil
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from trainer.config import Job
from trainer.config.image import Site
from trainer.config.stack_table import MACHINES, StackRow, number, table
from trainer.errors import ClusterError, InputError
from trainer.image.base import mirrors_of, system_name
from trainer.image.context import certificates, check_files
from trainer.image.pins import of_linux, pins
from trainer.image.recipe import recipe
from trainer.sysinfo.template_folder import FOLDER
from trainer.text.terminal import say

_SYSTEM_S = "/etc/ssl/certs/ca-certificates.crt"
_GLIBC_MINOR = 28  # glibc 2.28, which is enough for most wheels


def fill(job: Job, folder: Path) -> int:
    """Download wheels and Horovod's source; returns how many files the folder then has.

    The wheels are for the image's Python, not for this one. pip asks the index of the job's mirrors, as the
    build does. Raises InputError if the folder cannot be made, ClusterError if pip fails.
    """
    site = job.image.site.model_copy(update={"wheelhouse": None})  # the job may already name this folder
    known, made, docker = table(), recipe(job), FOLDER / "docker"
    check_files(site)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"{folder} cannot be filled: {problem.strerror}") from None
    python = known.systems[system_name(job, known) or ""].python
    target = [
        "--python-version",
        python,
        "--implementation",
        "cp",
        "--only-binary",
        ":all:",
        *_platforms(made.row, job.image.platform),
    ]
    names = (
        "requirements.txt",
        made.torch_pins,
        made.nccl_pins,
        "requirements-mpi.txt",
        "requirements-build.txt",
        made.text_pins,
    )
    lists = [docker / name for name in names if name]
    if made.toolkit == "pypi":
        lists.append(docker / made.nvcc_pins)
    with tempfile.TemporaryDirectory() as scratch:
        index = _index(site, mirrors_of(job).pip, Path(scratch))
        for locked in lists:
            _pip(folder, index, *target, "--require-hashes", "--no-deps", "--requirement", str(locked))
        if packages := _of_image(made.image.pip_packages, python, job.image.platform):
            constraints = Path(scratch) / "constraints.txt"
            constraints.write_text(
                "".join(f"{name}=={version}\n" for name, version in pins(made.row).items())
            )
            _pip(folder, index, *target, "--constraint", str(constraints), *packages)
        pin = Path(scratch) / "horovod.txt"
        pin.write_text(f"horovod=={known.horovod} --hash=sha256:{known.horovod_sha256}\n")
        _pip(
            folder,
            index,
            "--no-deps",
            "--no-binary",
            "horovod",
            "--no-build-isolation",
            "--require-hashes",
            "--requirement",
            str(pin),
        )
    return sum(1 for path in folder.iterdir() if path.is_file())


def _of_image(packages: Sequence[str], python: str, platform: str) -> list[str]:
    """Returns the requirements that hold in the image, without their markers, which pip takes as of here.

    pip also takes those of packages that these need as of this Python; where that is another, it is said.
    """
    here = ".".join(map(str, sys.version_info[:2]))
    version = {"python_version": python, "python_full_version": f"{python}.0"}
    image = {**of_linux(platform), **version, "extra": ""}
    wanted = []
    for text in packages:
        try:
            need = Requirement(text)
        except InvalidRequirement:  # pip knows more forms, such as an address alone
            wanted.append(text)
            continue
        if need.marker is None or need.marker.evaluate(image):
            need.marker = None
            wanted.append(str(need))
    if wanted and here != python:
        say(
            f"warning: the image has Python {python}, and pip runs with {here} here: packages that those of "
            f"image.pip_packages need only with Python {python} may be missing: name them in it, too"
        )
    return wanted


def _platforms(row: StackRow | None, platform: str) -> list[str]:
    """Returns the platform options of pip.

    pip takes each tag by itself, so every manylinux tag is listed up to the smallest glibc that the base may
    have.
    """
    machine = MACHINES[platform]
    minor = max(_GLIBC_MINOR, number(row.glibc)[1] if row else 0)
    tags = [f"manylinux_2_{older}" for older in range(minor, 4, -1)]
    return [
        word for tag in [*tags, "manylinux2014", "manylinux1"] for word in ("--platform", f"{tag}_{machine}")
    ]


def _index(site: Site, mirror: str | None, scratch: Path) -> dict[str, str]:
    """Returns the variables that make pip ask this site's index.

    It is empty if the job names no index; then pip's own configuration applies.
    """
    variables = {"PIP_CONFIG_FILE": site.pip_conf, "PIP_INDEX_URL": mirror}
    if site.certificates:
        bundle = scratch / "ca.pem"
        system = Path(ssl.get_default_verify_paths().cafile or _SYSTEM_S)
        bundle.write_bytes(certificates(site) + (system.read_bytes() if system.is_file() else b""))
        variables["PIP_CERT"] = str(bundle)
    return {name: value for name, value in variables.items() if value}


def _pip(folder: Path, index: dict[str, str], *arguments: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
        *arguments,
    ]
    done = subprocess.run(command, stdout=sys.stderr, env={**os.environ, **index})
    if done.returncode != 0:
        free_gb = shutil.disk_usage(folder).free / 1e9
        raise ClusterError(
            f"pip could not fill {folder} ({free_gb:.0f} GB free); see its messages above. Run the same "
            "command again to continue."
        )
