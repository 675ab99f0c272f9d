"""Chooses from the table what builds an image: the base's distribution, the source of nvcc, the g++.

Pure: opens no file and uses no network.
"""

from trainer.config import Job
from trainer.config.stack_table import Cuda, StackRow, StackTable, System, number
from trainer.errors import InputError
from trainer.image.base import base_of, system_name

_FIRST_CUDA_ON_UBUNTU_24_04 = (12, 5)
"""First CUDA release for which NVIDIA has images and packages on Ubuntu 24.04."""


def toolkit(job: Job, known: StackTable) -> str:
    """Returns the source of nvcc: pypi, debian or base. Raises InputError if none has it."""
    wanted = job.image.toolkit
    if job.stack.torch == "base":
        return "base"
    row, base = known.row(job.stack.torch), base_of(job, known)
    offers = known.cuda[row.cuda].nvcc
    has = {
        "pypi": "pypi" in offers,
        "debian": system_name(job, known) in offers,
        "base": "base" in offers and base.may_have_nvcc,
    }
    if wanted == "auto":
        has["base"] = has["base"] and base.says_all
        sources = [source for source, available in has.items() if available]
    else:
        sources = [wanted] if has[wanted] else []
    if not sources:
        raise InputError(_no_toolkit(row, wanted, known))
    return sources[0]


def _no_toolkit(row: StackRow, wanted: str, known: StackTable) -> str:
    ways = {
        "pypi": 'image.toolkit = "pypi"',
        "debian-13": 'image.toolkit = "debian" on a base of Debian 13',
        "base": f'image.toolkit = "base" on {base_with_nvcc(row, known)}',
    }
    given = (
        "no setting says where nvcc comes from"
        if wanted == "auto"
        else f'image.toolkit = "{wanted}" has no nvcc for it'
    )
    offers = known.cuda[row.cuda].nvcc
    return (
        f"stack.torch: torch {row.torch} needs nvcc of CUDA {row.cuda}, but {given}; use "
        f"{' or '.join(ways[offer] for offer in offers)}"
    )


def base_with_nvcc(row: StackRow, known: StackTable) -> str:
    """Returns, in words, an image that has nvcc for this stack, and no NCCL other than the stack's."""
    same = [
        release
        for release, nccl in known.nvidia_cuda_images.items()
        if nccl == row.nccl and number(release)[0] == row.cuda_major
    ]
    releases = [release for release in same if number(release) >= _FIRST_CUDA_ON_UBUNTU_24_04]
    if releases:
        return f"nvidia/cuda:{releases[-1]}-devel-ubuntu24.04"
    if row.cuda_major >= 13:
        return f"nvidia/cuda:{max(row.cuda, '13.1', key=number)}.*-devel-ubuntu24.04"
    if number(row.cuda) < _FIRST_CUDA_ON_UBUNTU_24_04:
        return f"an image of your own, with nvcc {row.cuda} and without NCCL (and with image.os)"
    package = f"cuda-minimal-build-{row.cuda.replace('.', '-')}"
    return (
        f"an image of your own, of nvidia/cuda:{row.cuda}.*-base-ubuntu24.04 with the package {package} "
        "(and with image.os)"
    )


def cuda_of(job: Job, row: StackRow | None, known: StackTable) -> Cuda | None:
    """Returns the CUDA release whose nvcc compiles; None if the table does not know the base's own."""
    return known.cuda.get(row.cuda if row else job.stack.cuda or "")


def compiler(system: System, row: StackRow | None, cuda: Cuda | None) -> int | None:
    """Returns the g++ to build with; None if none is compatible.

    It is the system's default, or else the newest that nvcc takes and torch's headers allow. `row` None means
    the base's torch, for which any g++ of the table's systems works.
    """
    least = 11 if row and row.cxx >= 20 else 9
    return next((gcc for gcc in system.gcc if least <= gcc and (cuda is None or gcc <= cuda.gcc_max)), None)


def bases(row: StackRow, known: StackTable) -> list[str]:
    """Returns the systems in the table that a plain base of this stack can be."""
    return [
        name
        for name, system in known.systems.items()
        if row.runs_on(system.python)
        and number(system.python) >= number(known.trainer_python_min)
        and number(system.glibc) >= number(row.glibc)
        and compiler(system, row, known.cuda[row.cuda])
        and _has_nvcc(name, row, known)
    ]


def _has_nvcc(system: str, row: StackRow, known: StackTable) -> bool:
    """Returns whether nvcc comes from a package, so that the base needs to contain only the system."""
    return not {"pypi", system}.isdisjoint(known.cuda[row.cuda].nvcc)
