"""Refuses, before anything is built, an image whose parts cannot work together. Pure: the job and the table alone."""

import re
from collections.abc import Callable, Iterator

from trainer.errors import InputError
from trainer.job import Job
from trainer.launch.image.choices import NVIDIA_IMAGE, compiler, system_name, toolkit
from trainer.launch.image.table import Cuda, Row, System, Table, has_code, number, table

_WITH_FRAMEWORK = re.compile(r"(?:.*/)?(pytorch|tensorflow|jax|nemo)(?::.*)?")
"""Of NVIDIA's catalogue, and of others who name theirs so."""


def check_stack(job: Job) -> None:
    """Raises InputError listing everything about [stack] and [image] that cannot work, each with what fits instead."""
    known = table()
    if job.stack.torch == "base":
        problems = [*_trainer(job, known), *_own_torch(job, known)]
    else:
        row = known.row(job.stack.torch)
        problems = [*_trainer(job, known), *(problem for look in _CHECKS for problem in look(job, row, known))]
    if problems:
        raise InputError("\n".join(problems))


def _trainer(job: Job, known: Table) -> Iterator[str]:
    if job.stack.open_clip != known.open_clip:
        yield f"stack.open_clip: the trainer is written against open_clip_torch {known.open_clip} (given {job.stack.open_clip})"


def _own_torch(job: Job, known: Table) -> Iterator[str]:
    """Of a base with a torch of its own the job alone is known here; the build looks at the rest."""
    if job.image.toolkit not in ("auto", "base"):
        yield f'image.toolkit: a base with a torch of its own has the nvcc for it too; "{job.image.toolkit}" would be a second one'
    base, system = job.image.base.partition("@")[0], system_name(job, known)
    if system is None:
        yield _no_system(job, known)
    elif job.image.os == "auto" or NVIDIA_IMAGE.fullmatch(base):  # its name says all that it has
        yield f"image.base: {base} brings no torch; leave stack.torch to a release of `clipship stacks`, or name a base that has one"
    if job.stack.driver is not None:
        yield from _own_driver(job, job.stack.driver, known)


def _own_driver(job: Job, driver: int, known: Table) -> Iterator[str]:
    if job.stack.cuda is None:
        yield "stack.driver: which driver the base's CUDA needs is not known without stack.cuda, which the build then holds the base to"
        return
    major = number(job.stack.cuda)[0]
    floors = [entry.driver_min for name, entry in known.cuda.items() if number(name)[0] == major]
    if not floors:
        yield f"stack.cuda: the table has no CUDA {major}, so that stack.driver cannot be held against it; leave stack.driver out"
    elif driver < min(floors):
        yield f"stack.driver: CUDA {job.stack.cuda} needs driver {min(floors)} or newer (given {driver})"


def _versions(job: Job, row: Row, known: Table) -> Iterator[str]:
    stack = job.stack
    if stack.cuda is not None and stack.cuda != row.cuda:
        others = _torches(known, lambda other: other.cuda == stack.cuda)
        yield f"stack.cuda: torch {row.torch} on the package index is built for CUDA {row.cuda}, not {stack.cuda}; {others}"
    if stack.nccl is not None and stack.nccl != row.nccl:
        others = _torches(known, lambda other: other.nccl == stack.nccl)
        yield (
            f"stack.nccl: torch {row.torch} brings NCCL {row.nccl}, and Horovod uses the same library: "
            f"{stack.nccl} would be a second one in the process; {others}"
        )
    if not known.trains(row):
        yield f"stack.torch: the trainer needs torch {known.trainer_torch_min} or newer (given {row.torch}): {known.trainer_torch_why}"


def _gpus(job: Job, row: Row, known: Table) -> Iterator[str]:
    for arch in dict.fromkeys(job.stack.archs):
        if not has_code(row.archs, arch):
            others = _torches(known, lambda other, arch=arch: has_code(other.archs, arch))  # type: ignore[misc]
            yield f"stack.archs: the wheel of torch {row.torch} has no code for {arch}, only for {', '.join(row.archs)}; {others}"
    driver, floor = job.stack.driver, known.cuda[row.cuda].driver_min
    if driver is not None and driver < floor:
        others = _torches(known, lambda other: known.cuda[other.cuda].driver_min <= driver)
        yield f"stack.driver: CUDA {row.cuda} of torch {row.torch} needs driver {floor} or newer (given {driver}); {others}"


def _base(job: Job, row: Row, known: Table) -> Iterator[str]:
    name = system_name(job, known)
    if name is None:
        yield _no_system(job, known)
        return
    yield from _nvidia_base(job, row, known)
    system, cuda = known.systems[name], known.cuda[row.cuda]
    yield from _python(name, system, row, known)
    if number(system.glibc) < number(row.glibc):
        yield f"image.base: {name} has glibc {system.glibc}, torch {row.torch} needs {row.glibc} or newer"
    if compiler(system, row, cuda) is None:
        yield _no_compiler(name, system, row, cuda, known)
    try:
        toolkit(job, known)
    except InputError as problem:
        yield str(problem)


def _no_system(job: Job, known: Table) -> str:
    return (
        f'image.os: what "{job.image.base}" is made of cannot be read from its name; say it, one of {", ".join(known.systems)}, '
        "on which alone images are built"
    )


def _no_compiler(name: str, system: System, row: Row, cuda: Cuda, known: Table) -> str:
    others = [other for other, entry in known.systems.items() if compiler(entry, row, cuda)]
    has = " or ".join(map(str, system.gcc))
    return f"image.base: nvcc {row.cuda} takes g++ up to {cuda.gcc_max}, {name} has {has}; {_or_none(others, 'a base of')}"


def _python(name: str, system: System, row: Row, known: Table) -> Iterator[str]:
    floor = number(known.trainer_python_min)
    fitting = [other for other, entry in known.systems.items() if number(entry.python) >= floor and row.runs_on(entry.python)]
    if number(system.python) < floor:
        needs = f"the trainer needs {known.trainer_python_min}"
    elif not row.runs_on(system.python):
        needs = f"torch {row.torch} has wheels for Python {' to '.join(row.python)}"
    else:
        return
    yield f"image.base: {name} has Python {system.python}, {needs}; {_or_none(fitting, 'a base of')}"


def _nvidia_base(job: Job, row: Row, known: Table) -> Iterator[str]:
    name = job.image.base.partition("@")[0]
    if framework := _WITH_FRAMEWORK.fullmatch(name):
        yield (
            f"image.base: {job.image.base} brings {framework[1]} and an NCCL of its own, to which nothing of a stack fits: the image would "
            'have two of each. stack.torch = "base" takes what the base has; else take a flavour of nvidia/cuda, or a plain Debian or '
            f"Ubuntu: the stack's torch {row.torch} comes as wheels"
        )
    nvidia = NVIDIA_IMAGE.fullmatch(name)
    if not nvidia:
        return
    release, kind = nvidia[1], nvidia[2]
    if number(release)[0] != row.cuda_major:
        yield f"image.base: {job.image.base} is of CUDA {release}, torch {row.torch} of {row.cuda}: their majors must agree"
    nccl = known.nvidia_cuda_images.get(release)
    if kind != "base" and nccl is not None and nccl != row.nccl:
        fitting = [f"nvidia/cuda:{other}-{kind}" for other, has in known.nvidia_cuda_images.items() if has == row.nccl]
        yield (
            f"image.base: {job.image.base} has NCCL {nccl} in its system folders, torch {row.torch} brings {row.nccl}; "
            f"take {' or '.join(fitting) or 'a plain Debian or Ubuntu, or a flavour without NCCL (-base-, or any of CUDA 13.1 and newer)'}"
        )


def _torches(known: Table, fits: Callable[[Row], bool]) -> str:
    return _or_none([row.torch for row in known.rows if fits(row) and known.trains(row)], "torch")


def _or_none(names: list[str], what: str) -> str:
    if not names:
        return f"no {what.removeprefix('a base of').strip() or 'system in the table'} that the trainer runs on fits"
    return f"{what} {' or '.join(names[:4])} fits"


_CHECKS = (_versions, _gpus, _base)
