"""Memory that this process may use and does use, for messages when it runs out.

Needs Linux; imports no torch.
"""

import resource
from collections.abc import Iterator
from pathlib import Path

from trainer.sysinfo.topology import ROOT, cgroup_files, file_text

_PHRASES = ("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc")
_ADVICE = (
    "To need less memory, lower optim.max_batch_size_per_gpu (the gradient stays the same), set "
    "model.grad_checkpointing or lower data.workers; to get more memory, raise resources.mem_gb_per_gpu"
)
_SHORT_SHARE = 0.1
"""Share of the machine's memory: with less than that left, memory may have run out a moment ago."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error means "out of memory": Python's, torch's on the host, or torch's on a GPU."""
    text = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(phrase in text for phrase in _PHRASES)
    )


def hint(peak_kb: int | None = None) -> str:
    """Returns one sentence with the memory figures and what to do.

    The figures are this rank's, or those of a dead rank that held `peak_kb` KiB at its peak.
    """
    return f"{', '.join(_numbers(peak_kb))}. {_ADVICE}"


def killed_hint(peak_kb: int, ranks: int) -> str:
    """Returns a sentence on whether memory ran out, after one of `ranks` ranks here was killed by SIGKILL.

    The rank held `peak_kb` KiB at its peak. Memory was not short if the machine has room for all ranks beside
    what is in use now.
    """
    machine = named_values(Path("/proc/meminfo"))
    if _cgroup_limit() is None and {"MemTotal", "MemAvailable"} <= machine.keys():
        available, total = (int(machine[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
        if available - ranks * peak_kb > _SHORT_SHARE * total:
            figures = ", ".join(_numbers(peak_kb))
            return f"memory was not short ({figures}), so a person, a scheduler or a program sent the signal"
    return f"the kernel does this when memory runs out: {hint(peak_kb)}"


def peak_kb(pid: int) -> int:
    """Returns the most memory that a running process has held, in KiB; 0 for one that has ended."""
    return int(named_values(Path(f"/proc/{pid}/status")).get("VmHWM", "0 kB").split()[0])


def host_bytes() -> int:
    """Returns the bytes of memory of this machine, or of its container or job if that has fewer."""
    total = int(named_values(Path("/proc/meminfo"))["MemTotal"].split()[0]) * 1024
    return min(total, _cgroup_limit() or total)


def _numbers(peak_kb: int | None) -> Iterator[str]:
    status = named_values(Path("/proc/self/status"))
    if peak_kb is not None:
        yield f"the rank held {peak_kb / 2**20:.1f} GiB at its peak"
    elif "VmRSS" in status:
        yield f"the rank holds {_gb(status['VmRSS'])}"
    if peak_kb is None and (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        yield (
            f"its address space is limited to {limit / 2**30:.1f} GiB (ulimit -v) and takes "
            f"{_gb(status.get('VmSize', '0 kB'))}"
        )
    if allowed := _cgroup_limit():
        yield f"its container or job is limited to {allowed / 2**30:.1f} GiB"
    machine = named_values(Path("/proc/meminfo"))
    if {"MemTotal", "MemAvailable"} <= machine.keys():
        yield f"the machine has {_gb(machine['MemAvailable'])} available of {_gb(machine['MemTotal'])}"


def _cgroup_limit() -> int | None:
    """Returns the smallest memory limit, in bytes, of this process's cgroup and the groups above it.

    Returns None if there is no limit.
    """
    files = cgroup_files("memory", "memory.max", "memory.limit_in_bytes", ROOT)
    limits = [int(text) for path in files if (text := file_text(path)).isdigit()]  # not "max"
    # cgroups v1 write "no limit" as a number larger than any machine's memory
    return min((size for size in limits if size < 2**60), default=None)


def named_values(path: Path) -> dict[str, str]:
    """Returns the file's `Name:   value` lines as a table; empty if it cannot be read."""
    lines = file_text(path).splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _gb(text: str) -> str:
    """Converts `2097152 kB` to `2.0 GiB`."""
    return f"{int(text.split()[0]) / 2**20:.1f} GiB"
