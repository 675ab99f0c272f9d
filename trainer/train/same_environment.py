"""Checks that all ranks run the same versions with the same settings, and names those that differ.

It names no communication library.
"""

import hashlib
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from trainer.comm.accelerator import is_cuda
from trainer.comm.device import device_name
from trainer.comm.protocol import Comm
from trainer.config import Job
from trainer.config.loader import dump_job
from trainer.errors import InputError
from trainer.sysinfo.libraries import image_stack, mapped, mpi_version, nccl_facts
from trainer.sysinfo.versions import versions

_VARIABLES = re.compile(r"NCCL_|TORCH_|HOROVOD_|OMP_NUM_THREADS$|CUDA_(?!VISIBLE_DEVICES)|PYTORCH_")
# Variables that launchers and supervisors set for each rank or node to a value of its own, or for rank 0
# alone.
_OWN = re.compile(
    r"HOROVOD_(RANK|SIZE|LOCAL_|CROSS_|HOSTNAME|GLOO_RENDEZVOUS|GLOO_IFACE|RUN_|SECRET|TIMELINE)"
    r"|TORCHELASTIC_|TORCH_ELASTIC_"
    r"|TORCH_NCCL_DEBUG_INFO|TORCH_FR_DUMP|NCCL_DEBUG_FILE"
    r"|NCCL_HOSTID|NCCL_TOPO|NCCL_IB_HCA|NCCL_SOCKET_IFNAME"
)
_LIBRARIES = ("libcudart", "libcudnn", "libmpi", "libmpi_cxx")
_NAMED = 8


def check_same(job: Job, comm: Comm) -> str:
    """Collective: returns what differs between ranks, or from the image that they run in; "" if nothing does.

    Raises InputError with that text, on every rank, if health.same_environment is "error".
    """
    if job.health.same_environment == "off":
        return ""
    mine = (comm.world.node, facts(job, comm), list(unlike_image(image_stack(), _stack())))
    everyone = comm.all_gather_object(mine)
    unequal = "\n".join(differences([(node, its) for node, its, _ in everyone]))
    unlike = "\n".join(_by_ranks([lines for _, _, lines in everyone]))
    problems = [f"the ranks differ in their software or settings:\n{unequal}"] * bool(unequal)
    problems += [
        f"the ranks run other versions than their image was built and verified with:\n{unlike}"
    ] * bool(unlike)
    if problems and job.health.same_environment == "error":
        hints = [
            *["use one image, one environment and one checkout on all nodes"] * bool(unequal),
            *["look for a mount, LD_LIBRARY_PATH or LD_PRELOAD that brings another library"] * bool(unlike),
        ]
        raise InputError(
            "\n".join(problems) + f'\n{"; ".join(hints)}, or set health.same_environment = "warn"'
        )
    return "\n".join(problems)


def unlike_image(expected: Mapping[str, str], actual: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each library or version that differs from the image's.

    A library that the process does not use counts as equal.
    """
    for name, known in expected.items():
        if actual.get(name, known) != known:
            yield f"{name} {actual[name]}, the image has {known}"


def _stack() -> dict[str, str]:
    """Returns this process's versions, under the names of the image's stack.json."""
    cuda, nccl = torch.version.cuda, nccl_facts()
    of_cuda = {"cuda": cuda} if cuda else {}
    of_nccl = {"nccl": nccl["nccl_mapped"]} if nccl else {}
    return {"torch": version("torch").partition("+")[0], **of_cuda, **of_nccl}


def _by_ranks(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields each line once, with the ranks that report it."""
    for line in dict.fromkeys(line for its in lines for line in its):
        yield f"  {line}: {_who(rank for rank, its in enumerate(lines) if line in its)}"


def facts(job: Job, comm: Comm) -> dict[str, str]:
    """Returns the facts that must be equal on all ranks, by name."""
    return {
        "python": platform.python_version(),
        **versions(),
        "cuda": torch.version.cuda or "none",
        **_device(comm),
        **{f"library {name}": " and ".join(paths) for name in _LIBRARIES if (paths := mapped(name))},
        **nccl_facts(),
        "mpi": mpi_version() or "none",
        **comm.versions(),
        "backend": comm.name,
        "code": own_code_hash(),
        "job file": hashlib.sha256(dump_job(job).encode()).hexdigest()[:12],
        **{
            f"variable {name}": value
            for name, value in os.environ.items()
            if _VARIABLES.match(name) and not _OWN.match(name)
        },
    }


def differences(everyone: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[str]:
    """Yields a line for each fact that differs: the commonest value, and the others with their ranks.

    `everyone` holds (node, facts) in rank order.
    """
    for name in sorted({name for _, its in everyone for name in its}):
        values = [its.get(name, "missing") for _, its in everyone]
        (usual, count), *others = Counter(values).most_common()
        if others:
            odd = [
                f"{value} on {_who(rank for rank, its in enumerate(values) if its == value)}"
                for value, _ in others
            ]
            nodes = sorted({everyone[rank][0] for rank, value in enumerate(values) if value != usual})
            yield (
                f"  {name}: {usual} on {count} of {len(values)} ranks, {', '.join(odd)} "
                f"({', '.join(nodes[:_NAMED])})"
            )


@cache
def own_code_hash() -> str:
    """Returns the hash of the trainer's own code, as it was when it was first asked for."""
    return code_hash(Path(__file__).parents[1])


def code_hash(folder: Path) -> str:
    """Returns a hash of every Python file below the folder, file names included."""
    digest = hashlib.sha256()
    # Not Path.rglob: sorting what it yields takes half a second.
    paths = (os.path.join(root, name) for root, _, names in os.walk(folder) for name in names)
    for path in sorted(path for path in paths if path.endswith(".py")):
        digest.update(f"{os.path.relpath(path, folder)}\0".encode() + Path(path).read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _device(comm: Comm) -> dict[str, str]:
    if not is_cuda(comm.device):
        return {"device": device_name(comm.device)}
    return {
        "device": device_name(comm.device),
        "cudnn": str(torch.backends.cudnn.version()),
        "driver": _driver(),
    }


def _driver() -> str:
    """Returns the version of NVIDIA's kernel driver; "unknown" if the kernel does not report it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    match = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return match.group() if match else "unknown"


def _who(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:_NAMED]))}{more}"
