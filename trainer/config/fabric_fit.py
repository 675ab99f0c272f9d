"""Compares the platform and the NCCL of a job's image with what the network between its nodes needs.

Pure; imports no torch. The tables are imported for the jobs that name a network: others need not wait.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.config.job import Job

if TYPE_CHECKING:
    from trainer.config.fabrics import Fabric


def fabric_of(job: Job) -> "Fabric | None":
    """Returns the network's row; None if the job names none or computes on the CPU."""
    name = job.resources.fabric
    if name is None or job.resources.on_cpu:
        return None
    from trainer.config.fabrics import FABRICS

    return FABRICS[name]


def fabric_problems(job: Job) -> Iterator[str]:
    """Yields a sentence for each thing in which the job's image does not fit its network."""
    yield from _platform_problems(job)
    yield from _nccl_problems(job)


def _platform_problems(job: Job) -> Iterator[str]:
    row = fabric_of(job)
    if row and row.platform and job.image.platform != row.platform.value:
        yield (
            f'resources.fabric = "{row.name}" needs {row.platform.name} = "{row.platform.value}" '
            f"({row.platform.why}), but the job has {job.image.platform}: change one of the two"
        )


def _nccl_problems(job: Job) -> Iterator[str]:
    """Yields a sentence if the NCCL of the job's image does not fit its network.

    For a torch of the base's own, stack.nccl says which it is; without it nothing is known here, and
    `nccl_unknown` says so. A torch that the table of stacks lacks is refused elsewhere.
    """
    row = fabric_of(job)
    if row is None or row.nccl is None:
        return
    version = _nccl(job)
    if version is None or row.nccl.fits(version):
        return
    needs = f'resources.fabric = "{row.name}" needs NCCL {row.nccl} ({row.nccl.why})'
    if job.stack.torch == "base":
        yield f"{needs}, but stack.nccl = {version}: take a base with such an NCCL, or another fabric"
        return
    from trainer.config.stack_table import table

    known = table()
    others = [other.torch for other in known.rows if known.trains(other) and row.nccl.fits(other.nccl)]
    if job.stack.torch in others:
        yield f"{needs}, but stack.nccl = {version}: leave stack.nccl out"
        return
    advice = f"set stack.torch to {' or '.join(others[:4])}" if others else "use another fabric"
    yield f"{needs}, but torch {job.stack.torch} brings {version}: {advice}"


def nccl_unknown(job: Job) -> Iterator[str]:
    """Yields a sentence if the network needs certain versions of NCCL and the job's is not known."""
    row = fabric_of(job)
    if row and row.nccl and job.stack.torch == "base" and job.stack.nccl is None:
        yield (
            f'resources.fabric = "{row.name}" needs NCCL {row.nccl}, and that of the base is not known here: '
            "set stack.nccl, to which the build then holds the image"
        )


def _nccl(job: Job) -> str | None:
    if job.stack.torch == "base":
        return job.stack.nccl
    from trainer.config.stack_table import table

    known = table()
    if all(row.torch != job.stack.torch for row in known.rows):
        return None
    return known.stack(job.stack.torch, job.stack.nccl).nccl
