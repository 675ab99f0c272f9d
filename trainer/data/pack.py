"""A table to WebDataset shards: the same bytes for the same table, in parallel; what was interrupted goes on where it stopped. No torch.

Shards are made in a folder beside the one asked for, each renamed when it is whole, and the folder is renamed when all are there.
`sizes.json` beside the shards gives the number of samples in each; `clipship check` reads it, as other loaders do.
"""

import io
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

from PIL import Image

from trainer.data.index import FOLDER, index_shards, write_catalogue
from trainer.data.pictures import decode
from trainer.data.sample import BadSample, RawSample
from trainer.data.shard_files import SIZES, PackedSample, check_replaceable, sample_sizes, write_shard
from trainer.data.source import IMAGE_ENDINGS
from trainer.data.tables import Table, list_rows, missing_images, read_table
from trainer.data.tar import Selection
from trainer.errors import InputError
from trainer.whole_file import write_json, write_whole

BAD_ROWS = "bad-rows.tsv"
PLAN = "plan.json"
QUALITY = 95


@dataclass(frozen=True)
class Recipe:
    """What is done with each row."""

    resize: int | None = None
    """Pixels: the shorter side of larger images becomes this, and all are encoded anew as JPEG."""
    skip_bad: bool = False
    """Leave out rows whose image is missing or cannot be decoded, and list them; else they are an error."""


@dataclass(frozen=True)
class Job:
    """One shard: its rows, each with number, image file, where it stands in the table, caption and other columns."""

    path: Path
    rows: tuple[tuple[int, Path, str, str, str], ...]
    recipe: Recipe


@dataclass(frozen=True)
class Packed:
    """The shards, and the rows that were left out: where, and why."""

    shards: list[Path]
    bad: list[tuple[str, str]]


def pack(
    table: Path,
    out: Path,
    *,
    samples_per_shard: int = 1000,
    shard_mb: float | None = None,
    image_column: str = "image",
    caption_column: str = "caption",
    separator: str | None = None,
    recipe: Recipe | None = None,
    processes: int = 1,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Packed:
    """The table's rows, in order, as shards in the folder `out`, which exists afterwards or is as it was; `progress(rows done, rows)`.

    A row becomes a sample with one caption, in one line; further columns become its JSON. `shard_mb` cuts by the size of the image files
    instead of by number. `force` replaces shards that were packed before, never other files.
    Raises InputError before anything is written: rows without caption, images that are missing or whose ending no job expects.
    """
    recipe = recipe or Recipe()
    check_replaceable(out, force)
    rows = read_table(table, image_column, caption_column, separator, keep_others=True)
    _check_images(rows, recipe)
    beside = out.parent / f".{out.name}.partial"
    jobs = list(_jobs(rows, beside, _cuts(rows, samples_per_shard, shard_mb), recipe))
    _begin(beside, rows, recipe, [len(job.rows) for job in jobs])
    bad = _run(jobs, processes, lambda done: progress(done, len(rows.rows)) if progress else None)
    _finish(beside, [job.path for job in jobs], bad)
    _replace(out, beside)
    return Packed([out / job.path.name for job in jobs], bad)


def _jobs(table: Table, folder: Path, cuts: Sequence[int], recipe: Recipe) -> Iterator[Job]:
    for number, (begin, end) in enumerate(pairwise(cuts)):
        others = table.others or ({},) * len(table.rows)
        rows = tuple(
            (row, table.image_path(row).absolute(), table.origin(row), table.captions[row], _json(others[row])) for row in range(begin, end)
        )
        yield Job(folder / f"shard-{number:06d}.tar", rows, recipe)


def _json(cells: object) -> str:
    return json.dumps(cells, ensure_ascii=False, sort_keys=True) if cells else ""


def _cuts(table: Table, samples: int, shard_mb: float | None) -> list[int]:
    """The row that each shard begins with, and the number of rows."""
    if shard_mb is None:
        return [*range(0, len(table.rows), samples), len(table.rows)]
    cuts, held = [0], 0
    for row in range(len(table.rows)):
        path = table.image_path(row)
        size = path.stat().st_size if path.is_file() else 0
        if held and held + size > shard_mb * 1e6:
            cuts.append(row)
            held = 0
        held += size
    return [*cuts, len(table.rows)]


def _begin(beside: Path, table: Table, recipe: Recipe, sizes: Sequence[int]) -> None:
    """Goes on in the folder of an interrupted run where it packed the same rows in the same way; else begins anew."""
    content = repr((table.images, table.captions, table.others, sizes, recipe)).encode()
    plan = json.dumps({"rows": len(table.rows), "recipe": asdict(recipe), "digest": blake2b(content, digest_size=16).hexdigest()})
    try:
        if not (beside / PLAN).exists() or (beside / PLAN).read_text() != plan:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            write_whole(beside / PLAN, plan)
    except OSError as error:
        raise InputError(f"{beside.parent}: cannot be written: {error.strerror} ({error.filename}); choose another folder") from error


def _run(jobs: Sequence[Job], processes: int, progress: Callable[[int], None]) -> list[tuple[str, str]]:
    """Makes the shards that are not there yet; the bad rows of all."""
    wanted = [job for job in jobs if not _report(job).exists()]
    done = sum(len(job.rows) for job in jobs) - sum(len(job.rows) for job in wanted)
    with _mapper(min(processes, len(wanted))) as each:
        for job, _ in zip(wanted, each(_make, wanted), strict=True):
            done += len(job.rows)
            progress(done)
    return [(origin, why) for job in jobs for origin, why in json.loads(_report(job).read_text())]


@contextmanager
def _mapper(processes: int) -> Iterator[Callable[..., Iterator[None]]]:
    """`map`, in so many processes."""
    if processes <= 1:
        yield map
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("forkserver")) as pool:
        yield pool.map


def _make(job: Job) -> None:
    """Writes one shard, whole, then the report that says so: the rows that were left out."""
    bad: list[tuple[str, str]] = []
    beside = job.path.with_suffix(".writing")
    write_shard(_samples(job, bad), beside)
    os.replace(beside, job.path)
    write_whole(_report(job), json.dumps(bad))


def _report(job: Job) -> Path:
    return job.path.with_suffix(".json")


def _samples(job: Job, bad: list[tuple[str, str]]) -> Iterator[PackedSample]:
    for number, image, origin, caption, other in job.rows:
        try:
            name, content = _image(image, origin, job.recipe)
        except (BadSample, OSError) as error:
            if not job.recipe.skip_bad:
                raise InputError(f"{origin}: image {image} cannot be used: {error}; --skip-bad-rows leaves such rows out") from error
            bad.append((origin, error.what if isinstance(error, BadSample) else str(error)))
            continue
        yield f"{number:09d}", {name: content, "txt": caption.encode(), **({"json": other.encode()} if other else {})}


def _image(path: Path, origin: str, recipe: Recipe) -> tuple[str, bytes]:
    """The member's ending and content."""
    content = path.read_bytes()
    if recipe.resize is None and not recipe.skip_bad:
        return _ending(path.name), content
    picture = decode(RawSample(path.name, origin, content, ()))
    if recipe.resize is None:
        return _ending(path.name), content
    share = recipe.resize / min(picture.size)
    if share < 1:
        size = (max(1, round(picture.width * share)), max(1, round(picture.height * share)))
        picture = picture.resize(size, Image.Resampling.BICUBIC, reducing_gap=3)
    file = io.BytesIO()
    picture.save(file, "jpeg", quality=QUALITY)
    return "jpg", file.getvalue()


def _finish(beside: Path, shards: Sequence[Path], bad: Sequence[tuple[str, str]]) -> None:
    """Sizes, the list of bad rows and the index; what only this run needed is removed."""
    write_json(beside / SIZES, {path.name: sample_sizes(path) for path in shards})
    if bad:
        write_whole(beside / BAD_ROWS, "".join(f"{origin}\t{' '.join(why.split())}\n" for origin, why in bad))
    selection = Selection(IMAGE_ENDINGS, "txt")
    write_catalogue(beside / FOLDER, selection, index_shards([str(path) for path in shards], selection, beside / FOLDER))
    for path in (*(path.with_suffix(".json") for path in shards), beside / PLAN):
        path.unlink(missing_ok=True)


def _replace(out: Path, beside: Path) -> None:
    """The new shards are in place before an old one is removed: an interrupted call loses neither."""
    old = out.parent / f".{out.name}.replaced"
    if out.exists():
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
    beside.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _check_images(table: Table, recipe: Recipe) -> None:
    unknown = [row for row, image in zip(table.rows, table.images, strict=True) if _ending(image) not in IMAGE_ENDINGS]
    problems = []
    if missing := [] if recipe.skip_bad else missing_images(table):
        problems.append(f"{table.path}: image file missing in {list_rows(missing)}; relative paths start at {table.path.parent.absolute()}")
    if unknown and recipe.resize is None:
        allowed = ", ".join("." + ending for ending in IMAGE_ENDINGS)
        problems.append(f"{table.path}: image of another kind than {allowed} in {list_rows(unknown)}: convert or remove them")
    if problems:
        raise InputError("\n".join(problems))


def _ending(name: str) -> str:
    return Path(name).suffix.removeprefix(".").lower()
