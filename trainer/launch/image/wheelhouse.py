"""Fills a folder with all that an image's build asks a package index for, so that the build needs none. Runs pip; no torch."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from trainer.errors import ClusterError
from trainer.job import Job
from trainer.launch.image.choices import system_name
from trainer.launch.image.recipe import recipe
from trainer.launch.image.table import Row, number, table
from trainer.launch.templates import FOLDER

_GLIBC_MINOR = 28  # of 2.28, which most wheels ask for at most
_HOROVOD = "horovod==0.28.1 --hash=sha256:92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0\n"


def fill(job: Job, folder: Path) -> int:
    """Download the wheels for the image's Python, not this one's, and Horovod's source; returns how many files the folder has then.

    Raises ClusterError where pip fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made, docker = recipe(job), FOLDER / "docker"
    python = table().systems[system_name(job, table()) or ""].python
    target = ["--python-version", python, "--implementation", "cp", "--only-binary", ":all:", *_platforms(made.row)]
    names = ("requirements.txt", made.torch_pins, "requirements-mpi.txt", "requirements-build.txt")
    lists = [docker / name for name in names if name]
    if made.toolkit == "pypi":
        lists.append(docker / made.nvcc_pins)
    for pins in lists:
        _pip(folder, *target, "--require-hashes", "--no-deps", "--requirement", str(pins))
    if made.pip_packages:
        _pip(folder, *target, *made.pip_packages)
    with tempfile.TemporaryDirectory() as scratch:
        pin = Path(scratch) / "horovod.txt"
        pin.write_text(_HOROVOD)
        _pip(folder, "--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--require-hashes", "--requirement", str(pin))
    return sum(1 for path in folder.iterdir() if path.is_file())


def _platforms(row: Row | None) -> list[str]:
    """pip takes each tag by itself: every manylinux up to what the base's glibc allows at least."""
    minor = max(_GLIBC_MINOR, number(row.glibc)[1] if row else 0)
    tags = [f"manylinux_2_{older}_x86_64" for older in range(minor, 4, -1)]
    return [word for tag in [*tags, "manylinux2014_x86_64", "manylinux1_x86_64"] for word in ("--platform", tag)]


def _pip(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--dest", str(folder), *words]
    done = subprocess.run(command, stdout=sys.stderr)
    if done.returncode != 0:
        free_gb = shutil.disk_usage(folder).free / 1e9
        raise ClusterError(
            f"pip could not fill {folder} ({free_gb:.0f} GB free); what it said stands above. Run the same again: it goes on"
        )
