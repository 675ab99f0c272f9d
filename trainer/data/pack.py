"""Packs a table into WebDataset shards, in parallel: the same bytes for the same table. No torch.

An interrupted run is continued. Shards are made in a folder beside the one asked for. Each is renamed when it
is complete, and the folder when all are there. `sizes.json` beside the shards gives the number of samples in
each; `clipship check` reads it, as other loaders do.
"""

import io
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

from PIL import Image

from trainer.config import Data
from trainer.data.files import read_file
from trainer.data.image_cells import image_bytes
from trainer.data.index import FOLDER, index_shards, stale, write_catalogue
from trainer.data.pack_rows import IMAGE_ENDINGS, PackRow, Rows, allowed_endings, ending_of, rows_of_table
from trainer.data.pictures import decode, format_of_bytes
from trainer.data.sample import MOST_BYTES, BadSample, RawSample, check_file
from trainer.data.shard_files import SIZES, PackedSample, check_replaceable, sample_sizes, write_shard
from trainer.data.tar import Selection
from trainer.errors import InputError
from trainer.safe_io.atomic import write_json, write_whole
from trainer.sysinfo.parent import end_with_parent

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


@dataclass(frozen=True)
class Packed:
    """The shards, and the rows that were left out, each with its place and the reason."""

    shards: list[Path]
    bad: list[tuple[str, str]]


def pack(
    table: Path,
    out: Path,
    *,
    samples_per_shard: int = 1000,
    shard_mb: float | None = None,
    data: Data | None = None,
    recipe: Recipe | None = None,
    processes: int = 1,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Packed:
    """Packs the table's rows, in order, as shards into the folder `out`; if that fails, `out` is as it was.

    A row becomes a sample; each of its captions is a line, and further columns become its JSON. `data` names
    the columns; by default they are those of a job. `shard_mb` cuts by the size of the images (in MB) instead
    of by number. `force` replaces shards that were packed before, never other files. `progress` is called
    with (rows done, rows). Raises InputError before anything is written for rows of a text table without
    caption and for images that are missing or whose ending no job expects.
    """
    recipe = recipe or Recipe()
    check_replaceable(out, force)
    rows = rows_of_table(table, data or Data(train=(str(table),)))
    if problems := list(rows.problems(any_ending=recipe.resize is not None, skip_bad=recipe.skip_bad)):
        raise InputError("\n".join(problems))
    beside = out.parent / f".{out.name}.partial"
    jobs = list(_jobs(rows, beside, _cuts(rows, samples_per_shard, shard_mb), recipe))
    _begin(beside, rows, recipe, [job.count for job in jobs])
    bad = _run(jobs, processes, lambda done: progress(done, len(rows)) if progress else None)
    _finish(beside, [job.path for job in jobs], bad)
    _replace(out, beside)
    return Packed([out / job.path.name for job in jobs], bad)


def _jobs(rows: Rows, folder: Path, cuts: Sequence[int], recipe: Recipe) -> Iterator[Job]:
    for number, (begin, end) in enumerate(pairwise(cuts)):
        yield Job(folder / f"shard-{number:06d}.tar", rows.part(begin, end), end - begin, recipe)


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


def _begin(beside: Path, rows: Rows, recipe: Recipe, sizes: Sequence[int]) -> None:
    """Continues in the folder of an interrupted run of the same rows and recipe; else begins anew."""
    content = repr((rows.identity, sizes, recipe)).encode()
    plan = json.dumps(
        {
            "rows": len(rows),
            "recipe": asdict(recipe),
            "digest": blake2b(content, digest_size=16).hexdigest(),
        }
    )
    try:
        if not (beside / PLAN).exists() or (beside / PLAN).read_text() != plan:
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
    return [(origin, why) for job in jobs for origin, why in json.loads(_report(job).read_text())]


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
    """Writes one shard, whole, then its report.

    The report lists the rows that were left out and marks the shard as complete.
    """
    bad: list[tuple[str, str]] = []
    beside = job.path.with_suffix(".writing")
    write_shard(_samples(job, bad), beside)
    os.replace(beside, job.path)
    write_whole(_report(job), json.dumps(bad))


def _report(job: Job) -> Path:
    return job.path.with_suffix(".json")


def _samples(job: Job, bad: list[tuple[str, str]]) -> Iterator[PackedSample]:
    for row in job.rows:
        try:
            name, content = _image(row, job.recipe)
            if not row.captions:
                raise BadSample(row.origin, "", "bad captions", "captions are empty")
        except InputError as error:
            if not job.recipe.skip_bad:
                advice = "--skip-bad-rows leaves such rows out"
                raise InputError(f"{row.origin}: {_named(row)} cannot be used: {error}; {advice}") from error
            bad.append((row.origin, error.what if isinstance(error, BadSample) else str(error)))
            continue
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


def _finish(beside: Path, shards: Sequence[Path], bad: Sequence[tuple[str, str]]) -> None:
    """Writes sizes, the list of bad rows and the index; removes files that only this run needed."""
    write_json(beside / SIZES, {path.name: sample_sizes(path) for path in shards})
    if bad:
        write_whole(beside / BAD_ROWS, "".join(f"{origin}\t{' '.join(why.split())}\n" for origin, why in bad))
    selection = Selection(IMAGE_ENDINGS, "txt")
    new = stale([str(path) for path in shards], selection, beside / FOLDER)
    write_catalogue(beside / FOLDER, selection, index_shards(new, selection, beside / FOLDER))
    for path in (*(path.with_suffix(".json") for path in shards), beside / PLAN):
        path.unlink(missing_ok=True)


def _replace(out: Path, beside: Path) -> None:
    """Puts the new shards in place, then removes old ones, so that an interrupted call loses neither."""
    old = out.parent / f".{out.name}.replaced"
    if out.exists():
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
    beside.rename(out)
    shutil.rmtree(old, ignore_errors=True)
