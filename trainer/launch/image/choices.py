"""What an image is built with, read off the table: the base's distribution, where nvcc comes from, which g++. Pure: no file, no network."""

from trainer.errors import InputError
from trainer.job import Job
from trainer.launch.image.base import base_of, system_name
from trainer.launch.image.table import Cuda, Row, System, Table, number

_FIRST_CUDA_ON_UBUNTU_24_04 = (12, 5)
"""Of NVIDIA's images and packages."""


def toolkit(job: Job, known: Table) -> str:
    """Where nvcc comes from: pypi, debian or base. Raises InputError where nobody has it."""
    wanted = job.image.toolkit
    if job.stack.torch == "base":
        return "base"
    row, base = known.row(job.stack.torch), base_of(job, known)
    offers = known.cuda[row.cuda].nvcc
    has = {"pypi": "pypi" in offers, "debian": system_name(job, known) in offers, "base": "base" in offers and base.may_have_nvcc}
    if wanted == "auto":
        has["base"] = has["base"] and base.says_all
        fitting = [kind for kind, fits in has.items() if fits]
    else:
        fitting = [wanted] if has[wanted] else []
    if not fitting:
        raise InputError(_no_toolkit(row, wanted, known))
    return fitting[0]


def _no_toolkit(row: Row, wanted: str, known: Table) -> str:
    ways = {
        "pypi": 'image.toolkit = "pypi"',
        "debian-13": 'image.toolkit = "debian" on a base of Debian 13',
        "base": f'image.toolkit = "base" on {base_with_nvcc(row, known)}',
    }
    given = "nothing says where nvcc comes from" if wanted == "auto" else f'image.toolkit = "{wanted}" has no nvcc for it'
    offers = known.cuda[row.cuda].nvcc
    return f"stack.torch: torch {row.torch} needs nvcc of CUDA {row.cuda} and {given}; take {' or '.join(ways[offer] for offer in offers)}"


def base_with_nvcc(row: Row, known: Table) -> str:
    """In words: an image that has nvcc for this stack, and no NCCL but the stack's."""
    same = [release for release, nccl in known.nvidia_cuda_images.items() if nccl == row.nccl and number(release)[0] == row.cuda_major]
    fitting = [release for release in same if number(release) >= _FIRST_CUDA_ON_UBUNTU_24_04]
    if fitting:
        return f"nvidia/cuda:{fitting[-1]}-devel-ubuntu24.04"
    if row.cuda_major >= 13:
        return f"nvidia/cuda:{max(row.cuda, '13.1', key=number)}.*-devel-ubuntu24.04"
    if number(row.cuda) < _FIRST_CUDA_ON_UBUNTU_24_04:
        return f"an image of your own, with nvcc {row.cuda} and without NCCL (and with image.os)"
    package = f"cuda-minimal-build-{row.cuda.replace('.', '-')}"
    return f"an image of your own, of nvidia/cuda:{row.cuda}.*-base-ubuntu24.04 with the package {package} (and with image.os)"


def cuda_of(job: Job, row: Row | None, known: Table) -> Cuda | None:
    """The CUDA release whose nvcc compiles; None where the base's own is not known to the table."""
    return known.cuda.get(row.cuda if row else job.stack.cuda or "")


def compiler(system: System, row: Row | None, cuda: Cuda | None) -> int | None:
    """The g++ to build with: the system's default, or the newest other that nvcc takes and torch's headers allow.

    `row` None: of the base's torch nothing is known but that any g++ of the table's systems compiles it.
    """
    least = 11 if row and row.cxx >= 20 else 9
    return next((gcc for gcc in system.gcc if least <= gcc and (cuda is None or gcc <= cuda.gcc_max)), None)


def bases(row: Row, known: Table) -> list[str]:
    """The systems in the table that a plain base of this stack can be."""
    return [
        name
        for name, system in known.systems.items()
        if row.runs_on(system.python)
        and number(system.python) >= number(known.trainer_python_min)
        and number(system.glibc) >= number(row.glibc)
        and compiler(system, row, known.cuda[row.cuda])
        and _has_nvcc(name, row, known)
    ]


def _has_nvcc(system: str, row: Row, known: Table) -> bool:
    """From a package, so that nothing but the system need be in the base."""
    return not {"pypi", system}.isdisjoint(known.cuda[row.cuda].nvcc)
