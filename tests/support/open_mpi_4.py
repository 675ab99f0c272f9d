"""An environment without an mpirun of its own, so that Debian's Open MPI 4 is used.

Its Horovod is built against that Open MPI. It has the packages of the environment that runs the tests; wheel
and environment are kept outside of the checkout.
"""

import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "clipship")
BUILD = Path(__file__).parents[2] / "docker" / "build-horovod.sh"
BUILD_TOOLS = ("cmake", "ninja")


def missing() -> str | None:
    """Names a program of Debian's packages that is missing; None if all are there."""
    return next((name for name in ("mpirun", "mpicxx") if not Path("/usr/bin", name).exists()), None)


needed = pytest.mark.skipif(missing() is not None, reason=f"needs /usr/bin/{missing()} of Open MPI 4")
backends = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("torch", marks=pytest.mark.mpi),
        pytest.param(
            "horovod",
            marks=[
                pytest.mark.mpi,
                pytest.mark.horovod,
                pytest.mark.full,
                pytest.mark.timeout(3600),  # the first time it builds a wheel of Horovod
            ],
        ),
    ],
)


def python(*, horovod: bool) -> Path:
    """Makes the environment the first time; with Horovod that takes some minutes."""
    text = f"{sys.prefix} {sys.version} {BUILD.read_text() if horovod else ''}"
    folder = CACHE / "open-mpi-4" / hashlib.sha256(text.encode()).hexdigest()[:12]
    found = folder / "bin" / "python"
    if not (folder / "ready").exists():
        _make(folder)
        if horovod:
            _add_horovod(folder, found)
        (folder / "ready").touch()
    return found


def _make(folder: Path) -> None:
    venv.create(folder, clear=True, symlinks=True)
    theirs = Path(sysconfig.get_path("platlib"))
    (_packages(folder) / "environment.pth").write_text(f"{theirs}\n")


def _packages(folder: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return folder / "lib" / version / "site-packages"


def _add_horovod(folder: Path, found: Path) -> None:
    ours = _packages(folder)
    theirs = Path(sysconfig.get_path("platlib"))
    for package in (
        theirs / "torch",
        *theirs.glob("torch-*.dist-info"),
    ):  # the build looks for torch beside itself
        (ours / package.name).symlink_to(package)
    for tool in BUILD_TOOLS:
        if (program := Path(sys.prefix, "bin", tool)).exists():
            (folder / "bin" / tool).symlink_to(program)
    wheel = _wheel(found)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(ours)


def _wheel(found: Path) -> str:
    """Without this environment's folder on PATH, whose mpicxx is another MPI's."""
    path = os.pathsep.join(
        part for part in os.environ["PATH"].split(os.pathsep) if not part.startswith(sys.prefix)
    )
    command = [str(BUILD), "--python", str(found), "--cache", str(CACHE / "wheels"), "--ops", "cpu"]
    return subprocess.run(
        command, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
