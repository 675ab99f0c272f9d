"""Writes shards and the folders that hold them: whole or not at all, the same bytes for the same samples.

No torch, so no webdataset, which imports it.
"""

import io
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

from trainer.data.index import FOLDER
from trainer.errors import InputError
from trainer.safe_io.atomic import write_json
from trainer.safe_io.plain import open_plain

SIZES = "sizes.json"
PackedSample = tuple[str, Mapping[str, bytes]]
"""A sample's key, and the content of its members by ending."""


def write_shards(samples: Iterable[PackedSample], folder: Path, samples_per_shard: int) -> list[str]:
    """Writes `shard-000000.tar`, ... and `sizes.json` into the folder; returns the shards' names."""
    remaining = iter(samples)
    sizes: dict[str, int] = {}
    for first in remaining:
        name = f"shard-{len(sizes):06d}.tar"
        sizes[name] = write_shard(chain([first], islice(remaining, samples_per_shard - 1)), folder / name)
    write_json(folder / SIZES, sizes)
    return list(sizes)


def write_shard(samples: Iterable[PackedSample], path: Path) -> int:
    """Writes one shard; returns its number of samples."""
    count = 0
    with _flushed(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for key, members in samples:
            for ending, content in sorted(members.items()):
                # A new TarInfo has no user, no group and the time 0, so the bytes depend on the content
                # alone.
                info = tarfile.TarInfo(f"{key}.{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            count += 1
    return count


def check_replaceable(out: Path, force: bool) -> None:
    """Raises InputError unless the folder can be renamed, and is empty or `force` may replace what it holds.

    With `force`, packed shards may be replaced.
    """
    fixed = {
        "a link": out.is_symlink(),
        "a mount point": os.path.ismount(out),
        "the working folder": os.path.realpath(out) == os.path.realpath("."),
    }
    if kinds := [kind for kind, is_so in fixed.items() if is_so]:
        raise InputError(f"{out} is {kinds[0]}, which cannot be replaced as a whole: give a folder inside it")
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"{out} is a file: give a folder that is new or empty")
    refuse_to_replace(str(out), sorted(path.name for path in out.iterdir()), force)


def is_packed(name: str) -> bool:
    """Returns whether a name is that of a packed shard, or of a file beside it."""
    return name in (SIZES, FOLDER, "bad-rows.tsv") or (name.startswith("shard-") and name.endswith(".tar"))


def refuse_to_replace(out: str, held: Sequence[str], force: bool) -> None:
    """Raises InputError if names are held there, unless `force` is set and all are of packed shards."""
    foreign = [name for name in held if not is_packed(name)]
    if held and (foreign or not force):
        shown = ", ".join((foreign or held)[:3])
        way_out = (
            "only packed shards can be replaced: give another folder"
            if foreign
            else "give another folder, or --force to replace it"
        )
        raise InputError(f"{out}: the folder is not empty (it holds {shown}); {way_out}")


@contextmanager
def _flushed(path: Path) -> Iterator[io.BufferedWriter]:
    with open(path, "wb", opener=open_plain) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
