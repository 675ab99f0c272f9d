"""Facts about a base image that its name tells. Pure: opens no file and uses no network."""

import re
from dataclasses import dataclass

from trainer.config import Job
from trainer.config.mirrors import Mirrors, path_at_hub
from trainer.config.stack_table import ARCHITECTURES, StackTable, number, table

STAGES = (
    "site",
    "system",
    "wheels",
    "mpi",
    "horovod",
    "packages",
    "headers",
    "plugins",
    "extra",
    "own",
    "trainer",
)
"""Names of the Dockerfile's stages; in a FROM such a name means the stage, not an image."""

_NVIDIA_CUDA = re.compile(
    r"(?:.*/)?nvidia/cuda:(\d+\.\d+\.\d+)-(?:cudnn\d*-)?(base|runtime|devel)-(ubuntu)(\d\d\.\d\d)"
)
_DISTRIBUTION = re.compile(r"(debian|ubuntu):(\d+(?:\.\d+)?)")
_WITH_FRAMEWORK = re.compile(r"(?:.*/)?(pytorch|tensorflow|jax|nemo)(?::.*)?")
"""Images with a framework, from NVIDIA's catalogue or from others with the same names."""
_FIRST_CUDA_WITHOUT_NCCL = (13, 1)
"""First CUDA release whose images from NVIDIA have no NCCL in their system folders."""


@dataclass(frozen=True)
class Base:
    """A base image, described by its name.

    An image of a site's own may hold anything; its `says_all` is False.
    """

    name: str
    """Name without the digest."""
    distribution: str | None
    """Distribution by the image's name, spelled as in the table even if the table lacks it: ubuntu-20.04.
    None if the name does not tell."""
    cuda: str | None = None
    """CUDA release of an NVIDIA image with CUDA; None for other images."""
    flavour: str = ""
    """Kind of an NVIDIA image with CUDA: base, runtime or devel; "" for other images."""
    framework: str | None = None

    @property
    def says_all(self) -> bool:
        """True if the name tells everything in the image.

        It then names a plain distribution, or an NVIDIA image with CUDA.
        """
        return self.distribution is not None or self.cuda is not None

    @property
    def may_have_nvcc(self) -> bool:
        """True if the image may contain nvcc; False only if its name tells that it does not."""
        return not self.says_all or self.flavour == "devel"

    @property
    def has_nccl(self) -> bool:
        """True if the image has NCCL in its system folders, according to its name."""
        return (
            self.cuda is not None
            and self.flavour != "base"
            and number(self.cuda)[:2] < _FIRST_CUDA_WITHOUT_NCCL
        )


def base_of(job: Job, known: StackTable) -> Base:
    """Returns the base image that the job names."""
    name = job.image.base.partition("@")[0]
    if nvidia := _NVIDIA_CUDA.fullmatch(name):
        return Base(name, f"{nvidia[3]}-{nvidia[4]}", nvidia[1], nvidia[2])
    framework = _WITH_FRAMEWORK.fullmatch(name)
    return Base(name, _distribution(name, known), framework=framework[1] if framework else None)


def system_name(job: Job, known: StackTable) -> str | None:
    """Returns the table's name of the base's distribution.

    Returns None if neither image.os nor the base's name tells it.
    """
    if job.image.os != "auto":
        return job.image.os
    named = base_of(job, known).distribution
    return named if named in known.systems else None


def mirrors_of(job: Job) -> Mirrors:
    """Returns the mirrors that the job's build asks, a preset's among them.

    pip asks no preset's index if the job has a pip.conf of its own.
    """
    system = system_name(job, table()) or ""
    found = job.image.mirrors.with_preset(system, ARCHITECTURES[job.image.platform])
    return found.model_copy(update={"pip": None}) if job.image.site.pip_conf else found


def mirrored_base(job: Job) -> str | None:
    """Returns the base's name at the job's mirror of Docker Hub; None if the build takes `image.base`."""
    registry, path = job.image.mirrors.registry, path_at_hub(job.image.base)
    return f"{registry}/{path}" if registry and path else None


def _distribution(name: str, known: StackTable) -> str | None:
    short = name.removeprefix("docker.io/").removeprefix("library/")
    for system, entry in known.systems.items():
        if any(re.match(rf"{re.escape(known_name)}(?!\d)", short) for known_name in entry.names):
            return system
    other = _DISTRIBUTION.match(short)
    return f"{other[1]}-{other[2]}" if other else None
