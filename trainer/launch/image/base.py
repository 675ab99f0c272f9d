"""What the name of a base image says of what is in it. Pure: no file, no network."""

import re
from dataclasses import dataclass

from trainer.job import Job
from trainer.launch.image.table import Table, number

STAGES = ("site", "system", "wheels", "mpi", "horovod", "packages", "extra", "trainer")
"""Of the Dockerfile: in a FROM such a name is the stage."""

_NVIDIA_CUDA = re.compile(r"(?:.*/)?nvidia/cuda:(\d+\.\d+\.\d+)-(?:cudnn\d*-)?(base|runtime|devel)-(ubuntu)(\d\d\.\d\d)")
_DISTRIBUTION = re.compile(r"(debian|ubuntu):(\d+(?:\.\d+)?)")
_WITH_FRAMEWORK = re.compile(r"(?:.*/)?(pytorch|tensorflow|jax|nemo)(?::.*)?")
"""Of NVIDIA's catalogue, and of others who name theirs so."""
_FIRST_CUDA_WITHOUT_NCCL = (13, 1)
"""From it on NVIDIA's images with CUDA have none in their system folders."""


@dataclass(frozen=True)
class Base:
    """A base image by its name. What a site calls its own may hold anything: there `says_all` is False."""

    name: str
    """Without digest."""
    distribution: str | None
    """As its name says it, in the table's way, also where the table has no such one: ubuntu-20.04."""
    cuda: str | None = None
    """The CUDA release of one of NVIDIA's images with CUDA."""
    flavour: str = ""
    """base, runtime or devel, of those."""
    framework: str | None = None

    @property
    def says_all(self) -> bool:
        """A distribution as it comes, or one of NVIDIA's with CUDA: there is no more in it."""
        return self.distribution is not None or self.cuda is not None

    @property
    def may_have_nvcc(self) -> bool:
        """Not where the name says that there is none."""
        return not self.says_all or self.flavour == "devel"

    @property
    def has_nccl(self) -> bool:
        """In its system folders, by its name."""
        return self.cuda is not None and self.flavour != "base" and number(self.cuda)[:2] < _FIRST_CUDA_WITHOUT_NCCL


def base_of(job: Job, known: Table) -> Base:
    """The base that the job names."""
    name = job.image.base.partition("@")[0]
    if nvidia := _NVIDIA_CUDA.fullmatch(name):
        return Base(name, f"{nvidia[3]}-{nvidia[4]}", nvidia[1], nvidia[2])
    framework = _WITH_FRAMEWORK.fullmatch(name)
    return Base(name, _distribution(name, known), framework=framework[1] if framework else None)


def system_name(job: Job, known: Table) -> str | None:
    """The table's name of the base's distribution; None where neither image.os nor the base's name says it."""
    if job.image.os != "auto":
        return job.image.os
    named = base_of(job, known).distribution
    return named if named in known.systems else None


def _distribution(name: str, known: Table) -> str | None:
    short = name.removeprefix("docker.io/").removeprefix("library/")
    for system, entry in known.systems.items():
        if any(re.match(rf"{re.escape(known_name)}(?!\d)", short) for known_name in entry.names):
            return system
    other = _DISTRIBUTION.match(short)
    return f"{other[1]}-{other[2]}" if other else None
