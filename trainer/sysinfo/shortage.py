"""Shortages of a machine other than memory: open files, shared memory, disk space.

Each is reported in one sentence with its figures. Imports no torch.
"""

import errno
import resource
import shutil
from pathlib import Path

from trainer.errors import MachineError
from trainer.sysinfo.memory import host_bytes
from trainer.text.wording import many

SHARED_MEMORY = Path("/dev/shm")
LARGER_BY = "kubernetes.shm_gb, docker run --shm-size, or a memory volume of slurmd's pod"
"""Settings of the size of /dev/shm in a container, where it has 64 MB without any."""
LEAST_OPEN_FILES = 256
"""Lowest number of open files that a process needs. A launcher, or a rank with a few loader processes, has
about 100 files open; each further rank of the world takes one or two."""
_ENOUGH_OPEN_FILES = 4096
PREFETCHED = 2
"""Batches that each loader process works on or keeps ready."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FILES = (errno.EMFILE, errno.ENFILE)
_NO_FILES_TEXTS = ("Too many open files", "items of ancdata")
"""Texts of the errors that torch raises if there are too many open files when it hands a batch to another
process."""
_NO_THREADS_TEXT = "can't start new thread"


def raise_open_files_limit(needed: int = LEAST_OPEN_FILES) -> None:
    """Raise the soft limit on open files if it is low and the hard limit allows it.

    `needed` is the number of files that the process has open at most. Raises MachineError if the hard limit
    is too low as well.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = max(needed, _ENOUGH_OPEN_FILES)
    most = most if hard == unlimited else min(hard, most)
    if most < needed:
        raise MachineError(
            f"a process may open only {many(most, 'file')} here, but needs at least {needed:,}: "
            f"raise `ulimit -n` by {needed - most:,}"
        )
    if soft != unlimited and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def shared_memory_for_loaders(node: str, ranks: int, workers: int, batch_bytes: int) -> None:
    """Raises MachineError if the loader processes of a node's ranks need more shared memory than is free.

    `batch_bytes` is the size of one micro-batch of uint8 images. Without this check, a process without room
    for its next batch would die of a bus error.
    """
    needed = loader_bytes(ranks, workers, batch_bytes)
    keeps = f"{many(ranks, 'rank')} with data.workers = {workers} may keep {_mb(needed)} of images there"
    otherwise = "use fewer data.workers or a smaller optim.max_batch_size_per_gpu"
    _check_shared_memory(node, needed, keeps, otherwise)


def memory_for_state(node: str, needed: int, taken: int = 0, beside: int = 0) -> None:
    """Raises MachineError if a node has too little memory to keep its ranks' newest steps in shared memory.

    `needed` bytes are for the steps, `taken` of them are theirs already, and `beside` is for the loaders.
    """
    keeps = f"recovery.keep_in_memory takes {_mb(needed)} of it (twice weights and optimizer state)"
    also = f", and the loaders {_mb(beside)}" if beside else ""
    otherwise = "set recovery.keep_in_memory = false, so that restarts begin at a checkpoint"
    _check_shared_memory(node, needed + beside - taken, f"{keeps}{also}", otherwise)
    if needed > (total := host_bytes()):
        more = _mb(needed - total)
        raise MachineError(
            f"{node} has {_mb(total)} of memory, and {keeps}: give it {more} more, or {otherwise}"
        )


def _check_shared_memory(node: str, needed: int, keeps: str, otherwise: str) -> None:
    """Raises MachineError if fewer bytes are free; `keeps` says what takes them, `otherwise` what helps."""
    try:
        room = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return
    if (missing := needed - room.free) > 0:
        raise MachineError(
            f"{SHARED_MEMORY} of {node} has {_mb(room.free)} free of {_mb(room.total)}, and {keeps}: make it "
            f"{_mb(missing)} larger ({LARGER_BY}), or {otherwise}"
        )


def loader_bytes(ranks: int, workers: int, batch_bytes: int) -> int:
    """Returns the bytes of shared memory that the loader processes of a node's ranks may take.

    `batch_bytes` is the size of one micro-batch of uint8 images.
    """
    return ranks * workers * PREFETCHED * batch_bytes


def shortage(error: BaseException) -> str:
    """Returns one sentence if the error means that files, processes or disk space ran out, else ""."""
    number = error.errno if isinstance(error, OSError) else None
    if number in _DISK_FULL:
        return str(error)
    if number in _NO_FILES or any(text in str(error) for text in _NO_FILES_TEXTS):
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"too many open files ({error}): this process may open {soft}; raise `ulimit -n`"
    if number == errno.EAGAIN or _NO_THREADS_TEXT in str(error):
        soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        own = "" if soft == resource.RLIM_INFINITY else f"; this user may have {soft}"
        return (
            f"no more processes or threads may be started ({error}){own}: raise `ulimit -u`, or the "
            "container's limit of pids"
        )
    return ""


def with_missing_room(error: Exception, what: str, size: int, folder: Path) -> Exception:
    """Returns the error of a file system in one sentence; other errors are returned unchanged.

    `size` is the number of bytes that were to be written below `folder`. That of a full disk gets its
    figures; what is left of a quota is not known, since the disk's free space says nothing of it.
    """
    if not isinstance(error, OSError) or error.errno in (None, *_NO_FILES):
        return error
    if error.errno not in _DISK_FULL:
        hint = ": raise `ulimit -f`, the largest size of a file" if error.errno == errno.EFBIG else ""
        return MachineError(f"{what} cannot be written below {folder}: {error.strerror}{hint}")
    takes = f"{error.strerror}: {what} takes {_mb(size)}"
    if error.errno == errno.EDQUOT:
        return OSError(
            error.errno, f"{takes}: make room below {folder} (`quota -s`), or have the quota raised"
        )
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return error
    more = f"make room for {_mb(max(0, size - free))} more"
    return OSError(error.errno, f"{takes}, and {folder} has {_mb(free)} free: {more}")


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
