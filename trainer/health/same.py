"""Do all ranks run the same? What a rank runs, as names and values, and who differs. Names no communication library."""

import hashlib
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from trainer import jobfile
from trainer.comm.protocol import Comm
from trainer.errors import InputError
from trainer.job import Job
from trainer.libraries import image_stack, mapped, mpi_version, nccl_facts
from trainer.run import versions

_VARIABLES = re.compile(r"NCCL_|TORCH_|HOROVOD_|OMP_NUM_THREADS$|CUDA_(?!VISIBLE_DEVICES)|PYTORCH_")
# What launchers and supervisors give each rank or node a value of its own of, or rank 0 alone.
_OWN = re.compile(
    r"HOROVOD_(RANK|SIZE|LOCAL_|CROSS_|HOSTNAME|GLOO_RENDEZVOUS|GLOO_IFACE|RUN_|SECRET|TIMELINE)|TORCHELASTIC_|TORCH_ELASTIC_"
    r"|TORCH_NCCL_DEBUG_INFO|TORCH_FR_DUMP|NCCL_DEBUG_FILE|NCCL_HOSTID|NCCL_TOPO|NCCL_IB_HCA|NCCL_SOCKET_IFNAME"
)
_LIBRARIES = ("libcudart", "libcudnn", "libmpi", "libmpi_cxx")
_NAMED = 8


def check_same(job: Job, comm: Comm) -> str:
    """Collective: what differs between ranks, or from the image that they run in; "" where nothing does.

    Raises InputError with it, on every rank, where the job says so.
    """
    if job.health.same_environment == "off":
        return ""
    mine = (comm.world.node, facts(job, comm), list(unlike_image(image_stack(), _stack())))
    everyone = comm.all_gather_object(mine)
    unequal = "\n".join(differences([(node, its) for node, its, _ in everyone]))
    unlike = "\n".join(_by_ranks([lines for _, _, lines in everyone]))
    found = [f"the ranks do not run the same:\n{unequal}"] * bool(unequal)
    found += [f"the ranks do not run what their image was built and proven with:\n{unlike}"] * bool(unlike)
    if found and job.health.same_environment == "error":
        hints = [
            *["make them equal (one image, one environment, one checkout for all nodes)"] * bool(unequal),
            *["look for a mount, LD_LIBRARY_PATH or LD_PRELOAD that brings another library"] * bool(unlike),
        ]
        raise InputError("\n".join(found) + f'\n{"; ".join(hints)}, or set health.same_environment = "warn"')
    return "\n".join(found)


def unlike_image(promised: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    """A line for each thing that the image has otherwise than this process; what the process does not use is not missed."""
    for name, expected in promised.items():
        if found.get(name, expected) != expected:
            yield f"{name} {found[name]}, the image has {expected}"


def _stack() -> dict[str, str]:
    """Of this process, under the names of the image's stack.json."""
    cuda, nccl = torch.version.cuda, nccl_facts()
    of_cuda = {"cuda": cuda} if cuda else {}
    of_nccl = {"nccl": nccl["nccl_mapped"]} if nccl else {}
    return {"torch": version("torch").partition("+")[0], **of_cuda, **of_nccl}


def _by_ranks(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Each line once, with the ranks that say it."""
    for line in dict.fromkeys(line for its in lines for line in its):
        yield f"  {line}: {_who(rank for rank, its in enumerate(lines) if line in its)}"


def facts(job: Job, comm: Comm) -> dict[str, str]:
    """What must be equal on all ranks, by name."""
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
        "code": code_hash(Path(__file__).parents[1]),
        "job file": hashlib.sha256(jobfile.dump(job).encode()).hexdigest()[:12],
        **{f"variable {name}": value for name, value in os.environ.items() if _VARIABLES.match(name) and not _OWN.match(name)},
    }


def differences(everyone: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[str]:
    """A line for each fact that is not the same on all ranks: the commonest value, and the ranks with another, (node, facts) by rank."""
    for name in sorted({name for _, its in everyone for name in its}):
        values = [its.get(name, "not there") for _, its in everyone]
        (usual, count), *others = Counter(values).most_common()
        if others:
            odd = [f"{value} on {_who(rank for rank, its in enumerate(values) if its == value)}" for value, _ in others]
            nodes = sorted({everyone[rank][0] for rank, value in enumerate(values) if value != usual})
            yield f"  {name}: {usual} on {count} of {len(values)} ranks, {', '.join(odd)} ({', '.join(nodes[:_NAMED])})"


def code_hash(folder: Path) -> str:
    """Of every Python file below the folder, names included."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def _device(comm: Comm) -> dict[str, str]:
    if comm.device.type != "cuda":
        return {"device": comm.device.type}
    return {
        "device": torch.cuda.get_device_name(comm.device),
        "cudnn": str(torch.backends.cudnn.version()),
        "driver": _driver(),
    }


def _driver() -> str:
    """NVIDIA's kernel driver; "unknown" where it does not say."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found.group() if found else "unknown"


def _who(ranks: Iterable[int]) -> str:
    found = list(ranks)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found[:_NAMED]))}{more}"
