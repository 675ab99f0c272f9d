"""Types of docker/stacks.toml: the torch, CUDA, NCCL, Python, compilers and systems that go together.

Reads only that file; imports no torch.
"""

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.errors import InputError
from trainer.sysinfo.template_folder import FOLDER

Number = tuple[int, ...]

ARM64 = "linux/arm64"
MACHINES = {"linux/amd64": "x86_64", ARM64: "aarch64"}
"""Names of the processors in the names of wheels, by the platform of an image."""
ARCHITECTURES = {"linux/amd64": "amd64", ARM64: "arm64"}
"""Names of the processors in Debian, by the platform of an image."""


def number(version: str) -> Number:
    """Converts a version to numbers that can be compared: "12.4" to (12, 4)."""
    return tuple(int(part) for part in version.split("."))


def has_code(archs: Sequence[str], gpu: str) -> bool:
    """Returns whether a torch with code for `archs` runs on a GPU of compute capability `gpu`.

    Code for 8.0 also runs on 8.6, but not on 9.0.
    """
    major, minor = number(gpu)
    return any(number(arch)[0] == major and number(arch)[1] <= minor for arch in archs)


@dataclass(frozen=True)
class KnownBad:
    """A known problem of a stack, and its remedy."""

    text: str
    from_nodes: int = 1
    """Smallest number of nodes on which it occurs."""
    unless: str = ""
    """Variable that avoids it, as NAME=VALUE."""
    nccl: str = ""
    """NCCL that has it; "" if it does not depend on NCCL."""
    only_with: str = ""
    """Key of a job that has to be true for it, as section.key; "" if it does not depend on one."""


@dataclass(frozen=True)
class StackRow:
    """One torch release on the package index, with the versions that it brings and needs."""

    torch: str
    torchvision: str
    python: tuple[str, str]
    """The oldest and the newest Python with a wheel."""
    cuda: str
    cudnn: str
    nccl: str
    triton: str
    cxx: int
    """C++ standard of torch's headers."""
    cxx11_abi: bool
    glibc: str
    """Oldest glibc that the wheels run on."""
    archs: tuple[str, ...]
    """Compute capabilities of the GPUs that the wheel for linux/amd64 has code for."""
    archs_arm64: tuple[str, ...] = ()
    """The same of the wheel for linux/arm64; empty if that wheel has no CUDA."""
    setuptools: str = ""
    numpy: str = ""
    known_bad: tuple[KnownBad, ...] = ()
    notes: tuple[str, ...] = ()
    built: tuple[str, ...] = ()
    """Notes on what this project built and ran with this release."""

    @property
    def cuda_major(self) -> int:
        return number(self.cuda)[0]

    @property
    def nccl_package(self) -> str:
        """Name of NCCL's package on the index."""
        return f"nvidia-nccl-cu{self.cuda_major}"

    def with_nccl(self, version: str) -> "StackRow":
        """Returns the row with another NCCL in the place of torch's own."""
        bad = tuple(entry for entry in self.known_bad if not entry.nccl)
        return replace(self, nccl=version, known_bad=bad)

    def archs_on(self, platform: str) -> tuple[str, ...]:
        """Returns the compute capabilities that the platform's wheel has code for; empty without CUDA."""
        return self.archs_arm64 if platform == ARM64 else self.archs

    def runs_on(self, python: str) -> bool:
        return number(self.python[0]) <= number(python) <= number(self.python[1])


@dataclass(frozen=True)
class Cuda:
    """One CUDA release."""

    gcc_max: int
    driver_min: int
    nvcc: tuple[str, ...]
    """Sources of the complete compiler: pypi, debian-13, base."""
    archs: tuple[str, ...]
    """Compute capabilities that nvcc compiles for."""


@dataclass(frozen=True)
class Nccl:
    """A release of NCCL that an image may have instead of an older one that its torch pins."""

    cuda_major: int


@dataclass(frozen=True)
class System:
    """A distribution that images start from."""

    names: tuple[str, ...]
    python: str
    gcc: tuple[int, ...]
    """Versions of g++ in the distribution's packages, the default first."""
    glibc: str
    openmpi: str


@dataclass(frozen=True)
class StackTable:
    """The whole content of docker/stacks.toml."""

    default: str
    trainer_torch_min: str
    trainer_torch_why: str
    trainer_python_min: str
    open_clip: str
    horovod: str
    horovod_sha256: str
    """Hash of Horovod's source archive on the package index."""
    rows: tuple[StackRow, ...]
    cuda: dict[str, Cuda] = field(default_factory=dict)
    nccl: dict[str, Nccl] = field(default_factory=dict)
    """Releases of NCCL that are newer than those of the rows, by version."""
    systems: dict[str, System] = field(default_factory=dict)
    nvidia_cuda_images: dict[str, str] = field(default_factory=dict)
    """NCCL in the system folders of nvidia/cuda's devel and runtime images, by CUDA release."""
    driver_min_of_gpu: dict[str, int] = field(default_factory=dict)
    """Oldest driver that supports a generation of GPUs, by the major number of its compute capability."""

    def row(self, torch: str) -> StackRow:
        """Returns the row of a torch release. Raises InputError if the table has none."""
        for row in self.rows:
            if row.torch == torch:
                return row
        known = ", ".join(row.torch for row in self.rows)
        raise InputError(
            f"the table has no stack for torch {torch}; it has {known}. `clipship stacks` lists them."
        )

    def newer_nccls(self, row: StackRow) -> list[str]:
        """Returns the releases of NCCL that may take the place of the row's own."""
        return [
            version
            for version, release in self.nccl.items()
            if release.cuda_major == row.cuda_major and number(version) > number(row.nccl)
        ]

    def stack(self, torch: str, nccl: str | None) -> StackRow:
        """Returns the row of a torch release, with the NCCL that takes the place of its own if one is named.

        A release that cannot take its place is left to others to refuse. Raises InputError if the table has
        no such torch.
        """
        row = self.row(torch)
        return row.with_nccl(nccl) if nccl in self.newer_nccls(row) else row

    def matching(self, torch: str, cuda: str | None, nccl: str | None) -> StackRow | None:
        """Returns the row with these versions of torch, CUDA and NCCL; None if there is none."""
        own = next((row for row in self.rows if row.torch == torch.partition("+")[0]), None)
        row = own and self.stack(own.torch, nccl)
        return row if row and (row.cuda, row.nccl) == (cuda, nccl) else None

    def driver_of_gpu(self, arch: str) -> int:
        """Returns the oldest driver that supports a GPU of this compute capability.

        Returns 0 if CUDA's own minimum is higher.
        """
        return self.driver_min_of_gpu.get(str(number(arch)[0]), 0)

    def trains(self, row: StackRow) -> bool:
        """Returns whether the trainer runs on the row's torch."""
        return number(row.torch) >= number(self.trainer_torch_min)


@functools.cache
def table() -> StackTable:
    """Returns the table; the file is read once."""
    with (FOLDER / "docker" / "stacks.toml").open("rb") as file:
        raw = tomllib.load(file)
    made = {
        "rows": tuple(_row(row) for row in raw.pop("stack")),
        "systems": {name: System(**_tuples(entry)) for name, entry in raw.pop("os").items()},
        "cuda": {name: Cuda(**_tuples(entry)) for name, entry in raw["cuda"].items()},
        "nccl": {name: Nccl(**entry) for name, entry in raw["nccl"].items()},
    }
    return StackTable(**{**raw, **made})


def _row(entry: dict[str, Any]) -> StackRow:
    known_bad = tuple(KnownBad(**bad) for bad in entry.get("known_bad", ()))
    return StackRow(**_tuples({**entry, "known_bad": known_bad}))


def _tuples(entry: dict[str, object]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
