"""What an image is built with, read off the table: the base's distribution, where nvcc comes from, which g++. Pure: no file, no network."""

import re

from trainer.errors import InputError
from trainer.job import Job
from trainer.launch.image.table import Cuda, Row, System, Table, number

NVIDIA_IMAGE = re.compile(r"(?:.*/)?nvidia/cuda:(\d+\.\d+\.\d+)-(?:cudnn\d*-)?(base|runtime|devel)-(ubuntu\d\d\.\d\d)")
"""The names of NVIDIA's images with CUDA: its release, the flavour, the distribution."""


def system_name(job: Job, known: Table) -> str | None:
    """The table's name of the base's distribution; None where it can be read neither from image.os nor from the base's name."""
    if job.image.os != "auto":
        return job.image.os
    name = job.image.base.partition("@")[0].removeprefix("docker.io/").removeprefix("library/")
    nvidia = NVIDIA_IMAGE.fullmatch(name)
    if nvidia:
        return f"ubuntu-{nvidia[3].removeprefix('ubuntu')}" if f"ubuntu-{nvidia[3].removeprefix('ubuntu')}" in known.systems else None
    for system, entry in known.systems.items():
        if any(re.match(rf"{re.escape(known_name)}(?![\d])", name) for known_name in entry.names):
            return system
    return None


def toolkit(job: Job, known: Table) -> str:
    """Where nvcc comes from: pypi, debian or base. Raises InputError where nobody has it."""
    wanted = job.image.toolkit
    if job.stack.torch == "base":
        return "base"
    row = known.row(job.stack.torch)
    offers = known.cuda[row.cuda].nvcc
    system = system_name(job, known)
    fitting = [kind for kind in ("pypi", "debian", "base") if (f"debian-{system[7:]}" if kind == "debian" and system else kind) in offers]
    automatic = [kind for kind in fitting if kind != "base" or NVIDIA_IMAGE.fullmatch(job.image.base.partition("@")[0])]
    if wanted != "auto" and wanted in fitting:
        return wanted
    if wanted == "auto" and automatic:
        return automatic[0]
    raise InputError(_no_toolkit(row, wanted, offers))


def _no_toolkit(row: Row, wanted: str, offers: tuple[str, ...]) -> str:
    ways = {
        "pypi": 'image.toolkit = "pypi"',
        "debian-13": 'image.toolkit = "debian" on a base of Debian 13',
        "base": f'image.toolkit = "base" on a base with the toolkit, such as nvidia/cuda:{row.cuda}.*-devel-ubuntu24.04',
    }
    given = "nothing says where nvcc comes from" if wanted == "auto" else f'image.toolkit = "{wanted}" has no nvcc for it'
    return f"stack.torch: torch {row.torch} needs nvcc of CUDA {row.cuda} and {given}; take {' or '.join(ways[offer] for offer in offers)}"


def compiler(system: System, row: Row, cuda: Cuda) -> int | None:
    """The g++ to build with: the system's default, or the newest other that nvcc takes and torch's headers allow."""
    least = 11 if row.cxx >= 20 else 9
    return next((gcc for gcc in system.gcc if least <= gcc <= cuda.gcc_max), None)


def bases(row: Row, known: Table) -> list[str]:
    """The systems in the table that a plain base of this stack can be."""
    return [
        name
        for name, system in known.systems.items()
        if row.runs_on(system.python)
        and number(system.python) >= number(known.trainer_python_min)
        and number(system.glibc) >= number(row.glibc)
        and compiler(system, row, known.cuda[row.cuda])
    ]
