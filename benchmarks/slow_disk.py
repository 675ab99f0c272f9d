"""Our loader on a disk that is slow to find a place, from a cold page cache.

The kernel limits the reads of a control group to what a disk that turns gives: so many a second, wherever
they are, and so many bytes. `python -m benchmarks.slow_disk PATTERN GROUP` prints the samples per
second of one epoch with its first batch. They are not decoded: else a core that has other work, too, would
be what is measured.
"""

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.data_ours import batches_of
from trainer.config import Data
from trainer.data.processes import start_process_server
from trainer.data.sample import RawSample
from trainer.data.shard_names import expand_shards
from trainer.data.source import open_source

READS_PER_S, MB_PER_S = 120, 150
"""Figures of a disk with 7,200 turns a minute."""
GROUPS = Path("/sys/fs/cgroup")


class CannotSlowDown(Exception):
    """Says why this machine cannot make a disk slow."""


@contextmanager
def slow_disk(folder: Path, groups: Path = GROUPS) -> Iterator[Path]:
    """The folder of a control group whose processes read slowly from the disk that holds `folder`.

    Raises CannotSlowDown.
    """
    group, limits = limits_of(groups, disk_of(folder))
    try:
        group.mkdir()
        for name, limit in limits.items():
            (group / name).write_text(limit)
    except OSError as error:
        raise CannotSlowDown(f"{error.filename}: {error.strerror}") from error
    try:
        yield group
    finally:
        remove(group)


def limits_of(groups: Path, disk: str) -> tuple[Path, dict[str, str]]:
    """Returns the folder of a group that is to be made, and what its files are to say, version 1 or 2."""
    name, bytes_per_s = f"clipship-bench-{os.getpid()}", MB_PER_S * 10**6
    if (groups / "blkio").is_dir():
        return groups / "blkio" / name, {
            "blkio.throttle.read_iops_device": f"{disk} {READS_PER_S}",
            "blkio.throttle.read_bps_device": f"{disk} {bytes_per_s}",
        }
    limit = f"{disk} riops={READS_PER_S} rbps={bytes_per_s}"
    return groups / name, {"../cgroup.subtree_control": "+io", "io.max": limit}


def disk_of(folder: Path) -> str:
    """Returns the numbers of the disk that holds a folder. Raises CannotSlowDown if there is none."""
    device = folder.stat().st_dev
    known = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not known.exists():
        raise CannotSlowDown(f"{folder} lies on no disk of this machine's own")
    whole = known.resolve().parent if (known / "partition").exists() else known
    return (whole / "dev").read_text().strip()


def remove(group: Path) -> None:
    """Removes a control group when its last process has ended."""
    for _ in range(50):
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


def cool(paths: Sequence[str]) -> None:
    """Drops what memory holds of the files. Raises SystemExit if something stays."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            with suppress(BlockingIOError):
                os.preadv(file, [bytearray(1)], os.fstat(file).st_size // 2, os.RWF_NOWAIT)
                raise SystemExit(f"{path} stays in memory")
        finally:
            os.close(file)


def none(_raw: RawSample, _seed: int) -> Tensor:
    """Returns a pixel in place of an image."""
    return torch.zeros(3, 1, 1, dtype=torch.uint8)


def reads_in(group: Path) -> int:
    """Returns the reads that the disk has had from a control group, version 1 or 2; 0 before the first."""
    for name, found in (("blkio.throttle.io_serviced", r" Read (\d+)"), ("io.stat", r" rios=(\d+)")):
        if (file := group / name).exists():
            return sum(map(int, re.findall(found, file.read_text())))
    return 0


def main(pattern: str, group: str) -> None:
    server = start_process_server()
    source = open_source(Data(train=(pattern,)))
    for process in (server, os.getpid()):  # loader processes are the server's children
        (Path(group) / "cgroup.procs").write_text(str(process))
    cool(expand_shards([pattern]))
    begun = time.perf_counter()
    stream = batches_of(source, workers=1, epochs=1, pixels=none)
    seen = sum(len(batch.keys) for batch in stream)
    print(seen / (time.perf_counter() - begun))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
