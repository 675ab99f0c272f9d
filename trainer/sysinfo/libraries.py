"""Shared libraries that this process has mapped: torch and Horovod must share one NCCL. Imports no torch."""

import ctypes
import json
import re
import sys
from pathlib import Path

from trainer.sysinfo.topology import file_text


def mapped(name: str) -> tuple[str, ...]:
    """Returns the mapped files of library `name`, such as libnccl, each file once."""
    lines = file_text(Path("/proc/self/maps")).splitlines()
    paths = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    file = re.compile(rf"{re.escape(name)}\.so[.\d]*")
    return tuple(sorted(path for path in paths if file.fullmatch(path.rpartition("/")[2])))


def nccl_version(path: str) -> str:
    """Returns the version that the NCCL library at `path` reports: 23007 is 2.30.7 (nccl.h, NCCL_VERSION)."""
    number = ctypes.c_int()
    ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def nccl_facts() -> dict[str, str]:
    """Returns version and path of the mapped NCCL for a run's records; empty if none is mapped.

    Raises RuntimeError if several are mapped.
    """
    paths = mapped("libnccl")
    if len(paths) > 1:
        copies = ", ".join(f"{path} ({nccl_version(path)})" for path in paths)
        raise RuntimeError(
            f"this process has loaded {len(paths)} copies of NCCL, but torch and Horovod must share one: "
            f"{copies}"
        )
    return {"nccl_mapped": nccl_version(paths[0]), "nccl_library": paths[0]} if paths else {}


def mpi_version() -> str:
    """Returns the first line of the version text of the mapped MPI library; "" if none is mapped."""
    paths = mapped("libmpi")
    if not paths:
        return ""
    # MPI_MAX_LIBRARY_VERSION_STRING is 256 in Open MPI, 8192 in MPICH
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    ctypes.CDLL(paths[0]).MPI_Get_library_version(text, ctypes.byref(length))
    return text.value.decode(errors="replace").split("\n")[0].strip()


def image_stack() -> dict[str, str]:
    """Returns the versions that the image was built and verified with (torch, cuda, nccl).

    They are in its stack.json. Returns an empty table outside an image.
    """
    try:
        stack: dict[str, str] = json.loads((Path(sys.prefix) / "stack.json").read_text())
    except FileNotFoundError:
        return {}
    return stack
