"""Finds which CPUs and network adapters are next to a GPU, as Linux's /sys says, and the CPUs of a rank.

Every function takes the folder that holds `sys` and `proc`, so that tests give trees of their own. Changes
nothing and imports nothing of this project. Sources: Linux, Documentation/ABI/testing/sysfs-bus-pci
(local_cpulist, numa_node), Documentation/admin-guide/cgroup-v2.rst (cpuset.cpus.effective).
"""

import itertools
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.text.wording import runs_text

ROOT = Path("/")
_NVIDIA = "0x10de"
_DISPLAY, _ACCELERATOR_3D = "0x0300", "0x0302"
"""First digits of the PCI classes of GPUs: with and without a display connector."""
_CLOSENESS = (
    "behind the same PCI switch",
    "at the same root complex",
    "at the same NUMA node",
    "at another NUMA node",
)
"""Words for how close a network adapter is to a GPU, the closest first."""


@dataclass(frozen=True)
class Adapter:
    """Network adapter and how close it is to a GPU."""

    name: str
    """RDMA device such as "mlx5_0"; the network interface where there is no RDMA device."""
    closeness: str


@dataclass(frozen=True)
class CpuChoice:
    """CPUs to which a rank is bound, or why it is left as it is."""

    cpus: frozenset[int]
    """Empty: the rank is left as it is."""
    reason: str


def cpu_numbers(text: str) -> frozenset[int]:
    """Returns the CPUs of a list as the kernel writes it: "0-3,8". Raises ValueError for another text."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def cpus_next_to(address: str, root: Path = ROOT) -> frozenset[int]:
    """Returns the CPUs next to a PCI device, such as "0000:1a:00.0"; empty if the kernel does not know."""
    if numa_node(address, root) is None:
        return frozenset()
    with suppress(OSError, ValueError):
        return cpu_numbers((_device(address, root) / "local_cpulist").read_text())
    return frozenset()


def numa_node(address: str, root: Path = ROOT) -> int | None:
    """Returns the NUMA node of a PCI device; None if the kernel does not know it."""
    with suppress(OSError, ValueError):
        node = int((_device(address, root) / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def gpus(root: Path = ROOT) -> list[str]:
    """Returns the PCI addresses of the machine's NVIDIA GPUs, also those that this process may not use."""
    return sorted(
        path.name
        for path in (root / "sys/bus/pci/devices").glob("*")
        if file_text(path / "vendor") == _NVIDIA
        and file_text(path / "class").startswith((_DISPLAY, _ACCELERATOR_3D))
    )


def closest_adapters(address: str, root: Path = ROOT) -> list[Adapter]:
    """Returns the network adapters that are closest to the GPU, all equally close; RDMA devices come first.

    A machine with RDMA devices has its other adapters for other traffic.
    """
    rdma = root / "sys/class/infiniband"
    folder = rdma if any(rdma.glob("*")) else root / "sys/class/net"
    found = [(_distance(address, path / "device", root), path.name) for path in sorted(folder.glob("*"))]
    known = [(distance, name) for distance, name in found if distance is not None]
    least = min((distance for distance, _ in known), default=0)
    return [Adapter(name, _CLOSENESS[least]) for distance, name in known if distance == least]


def cpus_of_this_job(root: Path = ROOT) -> frozenset[int]:
    """Returns the CPUs that this process's container or batch job has; empty if the kernel does not say.

    They are those of its cgroup, else all that are online. A process may be bound to fewer of them.
    """
    of_cgroups = cgroup_files("cpuset", "cpuset.cpus.effective", "cpuset.effective_cpus", root)
    for path in (*of_cgroups, root / "sys/devices/system/cpu/online"):
        with suppress(OSError, ValueError):
            if cpus := cpu_numbers(path.read_text()):
                return cpus
    return frozenset()


def choose_cpus(
    address: str, ranks: int, needed: int, allowed: Collection[int], root: Path = ROOT
) -> CpuChoice:
    """Returns the CPUs for the rank of the GPU at this PCI address: those next to it that it may use now.

    `allowed` are the CPUs that the rank may use now; it never gets others. `ranks` are those of the node,
    each with a GPU. A rank whose launcher has bound it is left alone, and so are ranks that would share fewer
    than `needed` CPUs each.
    """
    near, mine = cpus_next_to(address, root), frozenset(allowed)
    wanted = near & mine
    if not near:
        return CpuChoice(frozenset(), f"the kernel does not say which CPUs are next to GPU {address}")
    if mine < cpus_of_this_job(root):
        return CpuChoice(frozenset(), f"the launcher has bound it to CPUs {runs_text(mine)}")
    if not wanted:
        return CpuChoice(frozenset(), f"none of its CPUs is next to GPU {address}")
    if wanted == mine:
        return CpuChoice(frozenset(), f"all CPUs that it may use are next to GPU {address}")
    sharing = min(ranks, sum(cpus_next_to(other, root) == near for other in gpus(root)) or 1)
    if len(wanted) < needed * sharing:
        return CpuChoice(
            frozenset(),
            f"{len(wanted)} CPUs next to GPU {address} are fewer than resources.cpus_per_gpu = {needed} for "
            f"each of {sharing} ranks",
        )
    return CpuChoice(wanted, f"next to GPU {address}, NUMA node {numa_node(address, root)}")


def _device(address: str, root: Path) -> Path:
    return root / "sys/bus/pci/devices" / address


def file_text(path: Path) -> str:
    """Returns the file's text, stripped; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _distance(address: str, other: Path, root: Path) -> int | None:
    """Returns the place in _CLOSENESS of a device's link; None for a device that is no PCI device."""
    mine, theirs = _bridges(_device(address, root)), _bridges(other)
    if not mine or not theirs:
        return None
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(mine, theirs, strict=False))
    shared = sum(1 for _ in same)
    if shared > 1:
        return 0
    if shared == 1:
        return 1
    nodes = numa_node(address, root), numa_node(other.resolve().name, root)
    return 2 if nodes[0] is not None and nodes[0] == nodes[1] else 3


def _bridges(link: Path) -> list[str]:
    """Returns the PCI path above a device: root complex, ports and switches; empty for other devices."""
    parts = link.resolve().parts
    begin = next((at for at, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return list(parts[begin:-1])


def cgroup_files(controller: str, name: str, name_v1: str, root: Path = ROOT) -> Iterator[Path]:
    """Yields the files of a name in this process's cgroup and in the groups above it, the innermost first.

    Those of cgroups v1 have another name. In a container its own group may look like the topmost one.
    """
    for line in file_text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = top / group.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(top):
                yield folder / (name_v1 if controllers else name)
