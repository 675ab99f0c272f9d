"""Samples to WebDataset shards: whole or not at all, and the same bytes for the same samples. No torch, so no webdataset, which imports it.

`sizes.json` beside the shards gives the number of samples in each; `clipship check` reads it, as other loaders do.
"""

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from secrets import token_hex

from trainer.data.index import FOLDER
from trainer.data.source import IMAGE_ENDINGS
from trainer.data.tables import Table, list_rows, missing_images, read_table
from trainer.errors import InputError

SIZES = "sizes.json"
PackedSample = tuple[str, Mapping[str, bytes]]
"""Key, and the content of its members by ending."""


def pack(
    table: Path,
    out: Path,
    *,
    samples_per_shard: int = 1000,
    image_column: str = "image",
    caption_column: str = "caption",
    separator: str | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """The table's rows, in order, as shards in the folder `out`, which exists afterwards or is as it was; `progress(samples, rows)`.

    A row becomes a sample with one caption, in one line. `force` replaces shards that were packed before, never other files.
    Raises InputError before anything is written: rows without caption, image files that are missing or whose ending no job expects.
    """
    check_replaceable(out, force)
    rows = read_table(table, image_column, caption_column, separator)
    _check_images(rows)
    with whole_folder(out, replace=force) as folder:
        names = write_shards(_samples(rows, progress), folder, samples_per_shard)
    return [out / name for name in names]


def write_shards(samples: Iterable[PackedSample], folder: Path, samples_per_shard: int) -> list[str]:
    """Writes `shard-000000.tar`, ... and `sizes.json` into the folder; returns the shards' names."""
    remaining = iter(samples)
    sizes: dict[str, int] = {}
    for first in remaining:
        name = f"shard-{len(sizes):06d}.tar"
        sizes[name] = _write_shard(chain([first], islice(remaining, samples_per_shard - 1)), folder / name)
    with _flushed(folder / SIZES) as file:
        file.write(json.dumps(sizes, indent=2).encode() + b"\n")
    return list(sizes)


@contextmanager
def whole_folder(out: Path, replace: bool = False) -> Iterator[Path]:
    """A folder to fill, renamed to `out` when the block succeeds and removed when it fails; `replace` removes what was there."""
    beside = out.parent / f".{out.name}.partial-{token_hex(4)}"
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror} ({error.filename}); choose another folder") from error
    try:
        yield beside
        if replace and out.exists():
            shutil.rmtree(out)
        beside.rename(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def check_replaceable(out: Path, force: bool) -> None:
    """Raises InputError where the folder holds anything, unless `force` and it is only shards packed before."""
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"{out}: is a file; give a folder that is new or empty")
    held = sorted(path.name for path in out.iterdir())
    foreign = [name for name in held if name not in (SIZES, FOLDER) and not (name.startswith("shard-") and name.endswith(".tar"))]
    if held and (foreign or not force):
        shown = ", ".join((foreign or held)[:3])
        way_out = (
            "only shards packed before can be replaced: give another folder" if foreign else "give another folder, or --force to replace it"
        )
        raise InputError(f"{out}: the folder is not empty (it holds {shown}); {way_out}")


def _check_images(table: Table) -> None:
    unknown = [row for row, image in zip(table.rows, table.images, strict=True) if _ending(image) not in IMAGE_ENDINGS]
    problems = []
    if missing := missing_images(table):
        problems.append(f"{table.path}: image file missing in {list_rows(missing)}; relative paths start at {table.path.parent.absolute()}")
    if unknown:
        allowed = ", ".join("." + ending for ending in IMAGE_ENDINGS)
        problems.append(f"{table.path}: image of another kind than {allowed} in {list_rows(unknown)}: convert or remove them")
    if problems:
        raise InputError("\n".join(problems))


def _samples(table: Table, progress: Callable[[int, int], None] | None) -> Iterator[PackedSample]:
    for number, (image, caption) in enumerate(zip(table.images, table.captions, strict=True)):
        yield f"{number:09d}", {_ending(image): table.read_image(number), "txt": caption.encode()}
        if progress:
            progress(number + 1, len(table.rows))


def _ending(name: str) -> str:
    return Path(name).suffix.removeprefix(".").lower()


def _write_shard(samples: Iterable[PackedSample], path: Path) -> int:
    """Returns the number of samples."""
    count = 0
    with (
        _flushed(path) as file,
        tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for key, members in samples:
            for ending, content in sorted(members.items()):
                # A new TarInfo names no user, no group and the time 0: the bytes depend on the content alone.
                info = tarfile.TarInfo(f"{key}.{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            count += 1
    return count


@contextmanager
def _flushed(path: Path) -> Iterator[io.BufferedWriter]:
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
