"""Packs a table into WebDataset shards, in parallel: the same bytes for the same table. No torch.

An interrupted run is continued. Shards are made in a folder beside the one asked for. Each is renamed when it
is complete, and the folder when all are there. To an address each goes when it is complete, and is removed
here; `sizes.json` comes last. It gives the number of samples in each shard; `clipship check` reads it, as
other loaders do.
"""

import io
import json
import multiprocessing
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

from PIL import Image

from trainer.config import Data, is_remote
from trainer.data.captions import bad_captions
from trainer.data.files import read_file
from trainer.data.image_cells import image_bytes
from trainer.data.index import FOLDER, index_shards, stale, write_catalogue
from trainer.data.pack_rows import IMAGE_ENDINGS, PackRow, Rows, allowed_endings, ending_of, rows_of_table
from trainer.data.pictures import decode, format_of_bytes
from trainer.data.sample import MOST_BYTES, BadSample, RawSample, check_file
from trainer.data.shard_files import (
    SIZES,
    PackedSample,
    check_replaceable,
    is_packed,
    refuse_to_replace,
    write_shard,
)
from trainer.data.store import names, put, remove
from trainer.data.tar import Selection
from trainer.errors import InputError, StorageError
from trainer.safe_io.atomic import json_text, write_json, write_whole
from trainer.sysinfo.parent import end_with_parent
from trainer.text.wording import many

BAD_ROWS = "bad-rows.tsv"
PLAN = "plan.json"
QUALITY = 95


@dataclass(frozen=True)
class Recipe:
    """Settings that say how each row is packed."""

    resize: int | None = None
    """Shorter side of the packed images, in pixels.

    Larger images are scaled down to it, and all are encoded as JPEG.
    """
    skip_bad: bool = False
    """True if rows whose image is missing or cannot be decoded are left out and listed; else they are an
    error.
    """


@dataclass(frozen=True)
class Job:
    """One shard and its rows."""

    path: Path
    rows: Iterable[PackRow]
    count: int
    """Number of its rows."""
    recipe: Recipe
    address: str | None = None
    """Address to which the shard goes; None if it stays."""


@dataclass(frozen=True)
class Packed:
    """The shards, and what is not in them."""

    shards: list[Path]
    """Paths of the shards; their names alone if they went to an address."""
    bad: list[tuple[str, str]]
    """Rows that were left out, each with its place and the reason."""
    bytes_in: Mapping[str, int]
    """Number of rows by the column whose bytes are null in the samples' JSON."""


def pack(
    table: Path,
    out: Path | str,
    *,
    samples_per_shard: int = 1000,
    shard_mb: float | None = None,
    data: Data | None = None,
    recipe: Recipe | None = None,
    processes: int = 1,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Packed:
    """Packs the table's rows, in order, as shards into `out`; if that fails, a folder is as it was.

    `out` is a folder, or as a text an address of object storage, which gets each shard when it is complete.

    A row becomes a sample; each of its captions is a line, and further columns become its JSON. `data` names
    the columns; by default they are those of a job. `shard_mb` cuts by the size of the images (in MB) instead
    of by number. `force` replaces shards that were packed before, never other files. `progress` is called
    with (rows done, rows). Raises InputError before anything is written for rows of a text table without
    caption and for images that are missing or whose ending no job expects, and if no row can be packed;
    StorageError if something cannot be written, as on a full disk.
    """
    recipe = recipe or Recipe()
    address = out if isinstance(out, str) and is_remote(out) else None
    out = Path(address.rpartition("/")[2] if address else out)
    if not address:
        check_replaceable(out, force)
    rows = rows_of_table(table, data or Data(train=(str(table),)))
    if not len(rows):
        raise InputError(f"{table}: the table has no rows, so there is nothing to pack")
    if problems := list(rows.problems(any_ending=recipe.resize is not None, skip_bad=recipe.skip_bad)):
        raise InputError("\n".join(problems))
    beside = out.parent / f".{out.name}.partial"
    jobs = list(_jobs(rows, beside, _cuts(rows, samples_per_shard, shard_mb), recipe, address))
    plan = _plan(rows, recipe, [job.count for job in jobs], address)
    if address and not _is_begun(beside, plan):
        refuse_to_replace(address, names(address), force)
    _begin(beside, plan)
    bad = _run(jobs, processes, lambda done: progress(done, len(rows)) if progress else None)
    if len(bad) == len(rows):
        shutil.rmtree(beside, ignore_errors=True)  # else these rows would stay bad when they are mended
        raise InputError(_none_packed(bad))
    bytes_in = _bytes_in(jobs)
    if address:
        _finish_there(beside, address, jobs, bad)
        return Packed([Path(job.path.name) for job in jobs], bad, bytes_in)
    with _writing(out):
        _finish(beside, jobs, bad)
        _replace(out, beside)
    return Packed([out / job.path.name for job in jobs], bad, bytes_in)


def _jobs(
    rows: Rows, folder: Path, cuts: Sequence[int], recipe: Recipe, address: str | None
) -> Iterator[Job]:
    for number, (begin, end) in enumerate(pairwise(cuts)):
        name = f"shard-{number:06d}.tar"
        to = f"{address}/{name}" if address else None
        yield Job(folder / name, rows.part(begin, end), end - begin, recipe, to)


def _cuts(rows: Rows, samples: int, shard_mb: float | None) -> list[int]:
    """Returns the first row of each shard, then the number of rows."""
    if shard_mb is None:
        return [*range(0, len(rows), samples), len(rows)]
    cuts, held = [0], 0
    for row, size in enumerate(rows.image_bytes()):
        if held and held + size > shard_mb * 1e6:
            cuts.append(row)
            held = 0
        held += size
    return [*cuts, len(rows)]


def _plan(rows: Rows, recipe: Recipe, sizes: Sequence[int], address: str | None) -> str:
    """Returns a text that differs for other rows, another recipe or another address."""
    content = repr((rows.identity, sizes, recipe, *([address] if address else []))).encode()
    return json.dumps(
        {
            "rows": len(rows),
            "recipe": asdict(recipe),
            "digest": blake2b(content, digest_size=16).hexdigest(),
        }
    )


def _is_begun(beside: Path, plan: str) -> bool:
    """Returns whether the folder is that of an interrupted run of the same plan."""
    return (beside / PLAN).exists() and (beside / PLAN).read_text() == plan


def _begin(beside: Path, plan: str) -> None:
    """Continues in the folder of an interrupted run of the same plan; else begins anew."""
    try:
        if not _is_begun(beside, plan):
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            write_whole(beside / PLAN, plan)
    except OSError as error:
        raise InputError(
            f"{beside.parent}: cannot be written: {error.strerror} ({error.filename}); choose another folder"
        ) from error


def _run(jobs: Sequence[Job], processes: int, progress: Callable[[int], None]) -> list[tuple[str, str]]:
    """Makes the shards that are not there yet; returns the bad rows of all shards."""
    wanted = [job for job in jobs if not _report(job).exists()]
    done = sum(job.count for job in jobs) - sum(job.count for job in wanted)
    with _mapper(min(processes, len(wanted))) as each:
        for job, _ in zip(wanted, each(_make, wanted), strict=True):
            done += job.count
            progress(done)
    return [(origin, why) for job in jobs for origin, why in json.loads(_report(job).read_text())["bad"]]


@contextmanager
def _mapper(processes: int) -> Iterator[Callable[..., Iterator[None]]]:
    """Returns a `map` that runs in `processes` processes."""
    if processes <= 1:
        yield map
        return
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=end_with_parent) as pool:
        yield pool.map


def _make(job: Job) -> None:
    """Writes one shard, whole, to its address if it has one, then its report.

    The report has the number of samples, lists the rows that were left out, counts those with bytes in a
    column of the JSON, and marks the shard as complete.
    """
    bad: list[tuple[str, str]] = []
    bytes_in: Counter[str] = Counter()
    beside = job.path.with_suffix(".writing")
    with _writing(job.path):
        samples = write_shard(_samples(job, bad, bytes_in), beside)
        os.replace(beside, job.path)
        if job.address and samples:  # one without samples waits here: if no row can be packed, none goes
            remove(f"{job.address.rpartition('/')[0]}/{SIZES}")  # mixed shards would count as a whole set
            put(job.path, job.address)
            job.path.unlink()
        write_whole(_report(job), json.dumps({"samples": samples, "bad": bad, "bytes": bytes_in}))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises StorageError, which names a file, if the system cannot write one in the block."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # an encoder's
            raise
        raise StorageError(
            f"{error.filename or path}: cannot be written: {error.strerror}; the same command goes on when "
            "that is mended, such as by making room"
        ) from error


def _report(job: Job) -> Path:
    return job.path.with_suffix(".json")


def _samples(job: Job, bad: list[tuple[str, str]], bytes_in: Counter[str]) -> Iterator[PackedSample]:
    for row in job.rows:
        try:
            name, content = _image(row, job.recipe)
            if isinstance(row.captions, ValueError):
                raise bad_captions(row.origin, "", row.captions)
        except InputError as error:
            if not job.recipe.skip_bad:
                advice = "--skip-bad-rows leaves such rows out"
                raise InputError(f"{row.origin}: {_named(row)} cannot be used: {error}; {advice}") from error
            bad.append((row.origin, error.what if isinstance(error, BadSample) else str(error)))
            continue
        bytes_in.update(row.bytes_in)
        yield (
            f"{row.number:09d}",
            {
                name: content,
                "txt": row.captions.encode(),
                **({"json": row.other.encode()} if row.other else {}),
            },
        )


def _named(row: PackRow) -> str:
    return f"image {row.image}" if isinstance(row.image, Path | str) else "its image"


def _image(row: PackRow, recipe: Recipe) -> tuple[str, bytes]:
    """Returns the member's ending and content."""
    name, content = _content(row)
    ending = ending_of(name) or format_of_bytes(content)
    if recipe.resize is None and ending not in IMAGE_ENDINGS:
        raise BadSample(
            row.origin, "", "format", f"the image is none of {allowed_endings()}: --resize converts it"
        )
    if recipe.resize is None and not recipe.skip_bad:
        return ending, content
    picture = decode(RawSample(name, row.origin, content, ()))
    if recipe.resize is None:
        return ending, content
    scale = recipe.resize / min(picture.size)
    if scale < 1:
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        picture = picture.resize(size, Image.Resampling.BICUBIC, reducing_gap=3)
    file = io.BytesIO()
    picture.save(file, "jpeg", quality=QUALITY)
    return "jpg", file.getvalue()


def _content(row: PackRow) -> tuple[str, bytes]:
    """Returns the name of the image, empty if it has none, and its content."""
    if not isinstance(row.image, Path):
        return "", image_bytes(row.image, row.table, row.origin, MOST_BYTES)
    path = row.image
    return path.name, read_file(
        path, str(path), lambda status: check_file(row.origin, path.name, status, MOST_BYTES), waits_s=()
    )


def _none_packed(bad: Sequence[tuple[str, str]]) -> str:
    origin, why = bad[0]
    return (
        f"{origin}: {why}; none of the table's {many(len(bad), 'row')} can be packed. Relative paths of "
        "images start at the table's folder."
    )


def _sizes_of(jobs: Sequence[Job]) -> dict[str, int]:
    return {job.path.name: json.loads(_report(job).read_text())["samples"] for job in jobs}


def _bytes_in(jobs: Sequence[Job]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for job in jobs:
        counts.update(json.loads(_report(job).read_text())["bytes"])
    return counts


def _bad_rows(bad: Sequence[tuple[str, str]]) -> str:
    return "".join(f"{origin}\t{' '.join(why.split())}\n" for origin, why in bad)


def _finish_there(beside: Path, address: str, jobs: Sequence[Job], bad: Sequence[tuple[str, str]]) -> None:
    """Removes what other shards left there; writes shards without samples, the bad rows, then the sizes."""
    sizes = _sizes_of(jobs)
    for job in jobs:
        if job.address and job.path.exists():
            put(job.path, job.address)
    for name in filter(is_packed, names(address)):
        if name not in sizes:
            remove(f"{address}/{name}")
    if bad:
        put(_bad_rows(bad).encode(), f"{address}/{BAD_ROWS}")
    put((json_text(sizes, indent=2) + "\n").encode(), f"{address}/{SIZES}")
    shutil.rmtree(beside, ignore_errors=True)


def _finish(beside: Path, jobs: Sequence[Job], bad: Sequence[tuple[str, str]]) -> None:
    """Writes sizes, the list of bad rows and the index; removes files that only this run needed."""
    shards = [job.path for job in jobs]
    write_json(beside / SIZES, _sizes_of(jobs))
    if bad:
        write_whole(beside / BAD_ROWS, _bad_rows(bad))
    selection = Selection(IMAGE_ENDINGS, "txt")
    new = stale([str(path) for path in shards], selection, beside / FOLDER)
    write_catalogue(beside / FOLDER, selection, index_shards(new, selection, beside / FOLDER))
    for path in (*(path.with_suffix(".json") for path in shards), beside / PLAN):
        path.unlink(missing_ok=True)


def _replace(out: Path, beside: Path) -> None:
    """Puts the new shards in place, then removes old ones, so that an interrupted call loses neither.

    The name for old ones is no longer than that of the folder beside, which could be made.
    """
    old = out.parent / f".{out.name}.former"
    if out.exists():
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
    beside.rename(out)
    shutil.rmtree(old, ignore_errors=True)
