"""Finds environment variables that look like settings of a library but that none reads.

The libraries are NCCL, its plugins, torch and Horovod. Such a setting has no effect, and the libraries do not
report it. Imports no torch.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from trainer.sysinfo.own_table import own_table
from trainer.text.near import did_you_mean

_LIBRARIES = ("nccl", "torch", "horovod")
_TITLES = {"nccl": "NCCL", "torch": "torch", "horovod": "Horovod"}
_BUILD_TIME = (
    "HOROVOD_WITH",
    "HOROVOD_GPU",
    "HOROVOD_CUDA",
    "HOROVOD_NCCL",
    "HOROVOD_CPU",
    "HOROVOD_BUILD",
    "HOROVOD_CMAKE",
)


def name_problems(
    names: Iterable[str], torch_version: str | None, machine: Iterable[str] = ()
) -> Iterator[str]:
    """Yields one sentence for each name with a prefix of these libraries that none of them reads.

    `machine` has the names of the environment, of which some only tell what an image holds. The sentence has
    the right name. If torch's version is the one in the table, NCCL's version is the table's too; otherwise
    it is unknown, and no NCCL variable counts as too new. `torch_version` None means that torch's version is
    unknown as well.
    """
    table = own_table(__file__, "variables.toml")
    same = (
        torch_version is not None and _numbers(torch_version)[:2] == _numbers(table["torch"]["version"])[:2]
    )
    versions = {
        "nccl": table["nccl"]["version"] if same else None,
        "torch": torch_version,
        "horovod": table["horovod"]["version"],
    }
    told = set(machine) - set(table["machine"]["names"])
    for name in sorted({*names, *told}):
        library = next(
            (entry for entry in _LIBRARIES if name.startswith(tuple(table[entry]["prefixes"]))), None
        )
        if library is None or name.startswith((*_BUILD_TIME, *table["nccl"]["plugins"])):
            continue
        if problem := _problem(name, library, versions[library], table):
            yield f"{name} has no effect: {problem}"


def _problem(name: str, library: str, version: str | None, table: dict[str, Any]) -> str | None:
    if instead := table["gone"].get(name):
        return str(instead)
    since = table[library]["since"].get(name)
    if since and version and _numbers(version) < _numbers(since):
        return f"{_TITLES[library]} {version} does not read it; {since} is the first version that does"
    if name in table[library]["names"]:
        return None
    hint = did_you_mean(name, table[library]["names"], most=1, least=0.75)
    return f"{_TITLES[library]} does not read it{hint}"


def _numbers(version: str) -> tuple[int, ...]:
    """Converts 2.14.1+cu130 to (2, 14, 1)."""
    parts = version.partition("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())
