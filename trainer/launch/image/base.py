"""What the name of a base image says of what is in it. Pure: no file, no network."""

import re
from dataclasses import dataclass

from trainer.job import Job
from trainer.launch.image.table import Table, number

STAGES = ("site", "system", "wheels", "mpi", "horovod", "packages", "extra", "trainer")
"""Of the Dockerfile: in a FROM such a name is the stage."""

_NVIDIA_CUDA = re.compile(r"(?:.*/)?nvidia/cuda:(\d+\.\d+\.\d+)-(?:cudnn\d*-)?(base|runtime|devel)-(ubuntu)(\d\d\.\d\d)")
_WITH_FRAMEWORK = re.compile(r"(?:.*/)?(pytorch|tensorflow|jax|nemo)(?::.*)?")
"""Of NVIDIA's catalogue, and of others who name theirs so."""
_FIRST_CUDA_WITHOUT_NCCL = (13, 1)
"""From it on NVIDIA's images with CUDA have none in their system folders."""
_UNKNOWN = "a release that the table does not have"


@dataclass(frozen=True)
class Base:
    """A base image by its name. What a site calls its own may hold anything: there `says_all` is False."""

    name: str
    """Without digest."""
    named_system: str | None
    """The table's name of the distribution, where the image's name has one."""
    cuda: str | None = None
    """The CUDA release of one of NVIDIA's images with CUDA."""
    flavour: str = ""
    """base, runtime or devel, of those."""
    framework: str | None = None

    @property
    def says_all(self) -> bool:
        """A distribution as it comes, or one of NVIDIA's with CUDA: there is no more in it."""
        return self.named_system is not None or self.cuda is not None

    @property
    def may_have_nvcc(self) -> bool:
        """Not where the name says that there is none."""
        return not self.says_all or self.flavour == "devel"

    def nccl(self, known: Table) -> str | None:
        """The NCCL in its system folders, as far as its name says it; None where there is none, or nobody can say."""
        if self.cuda is None or self.flavour == "base" or number(self.cuda)[:2] >= _FIRST_CUDA_WITHOUT_NCCL:
            return None
        return known.nvidia_cuda_images.get(self.cuda, _UNKNOWN)


def base_of(job: Job, known: Table) -> Base:
    """The base that the job names."""
    name = job.image.base.partition("@")[0]
    if nvidia := _NVIDIA_CUDA.fullmatch(name):
        system = f"{nvidia[3]}-{nvidia[4]}"
        return Base(name, system if system in known.systems else None, nvidia[1], nvidia[2])
    framework = _WITH_FRAMEWORK.fullmatch(name)
    return Base(name, _distribution(name, known), framework=framework[1] if framework else None)


def system_name(job: Job, known: Table) -> str | None:
    """The table's name of the base's distribution; None where neither image.os nor the base's name says it."""
    return job.image.os if job.image.os != "auto" else base_of(job, known).named_system


def _distribution(name: str, known: Table) -> str | None:
    short = name.removeprefix("docker.io/").removeprefix("library/")
    for system, entry in known.systems.items():
        if any(re.match(rf"{re.escape(known_name)}(?!\d)", short) for known_name in entry.names):
            return system
    return None
