"""Packs a table into WebDataset shards, in parallel: the same bytes for the same table. No torch.

An interrupted run is continued. Shards are made in a folder beside the one asked for. Each is renamed when it
is complete, and the folder when all are there. To an address each goes when it is complete, and is removed
here; `sizes.json` comes last. It gives the number of samples in each shard; `clipship check` reads it, as
other loaders do.

Rows of a text table are in memory, as its images are files. A table in row groups is read again for each
shard, group by group.
"""

import io
import json
import multiprocessing
import os
import shutil
import stat
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from PIL import Image

from trainer.config import Data, is_remote
from trainer.config.formats import FORMATS, row_of
from trainer.data.captions import Captions, bad_captions, captions_in, gathered
from trainer.data.columnar import Columns, check_columns
from trainer.data.files import Stamp, read_file, stamp
from trainer.data.image_cells import INSIDE, drive_advice, image_bytes, image_cell, is_url, named_image
from trainer.data.index import FOLDER, index_shards, stale, write_catalogue
from trainer.data.pictures import decode, format_of_bytes
from trainer.data.row_groups import cells_of, open_groups
from trainer.data.sample import MOST_BYTES, BadSample, RawSample, check_file, kind_of_file
from trainer.data.source import IMAGE_ENDINGS
from trainer.data.store import names, put, remove
from trainer.data.tables import Table, TableColumns, list_rows, read_all_rows, unfilled
from trainer.data.tar import Selection
from trainer.errors import InputError, StorageError
from trainer.safe_io.atomic import json_text, write_json, write_whole
from trainer.safe_io.plain import open_plain, parse_json
from trainer.sysinfo.parent import end_with_parent
from trainer.text.wording import many

SIZES = "sizes.json"
PackedSample = tuple[str, Mapping[str, bytes]]
"""A sample's key, and the content of its members by ending."""
_IMAGES, _TEXTS = "_imgs.tsv", "_texts.jsonl"
"""Ends of the names of Chinese-CLIP's pair of files: ids with pictures in base64, and texts with such ids."""


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


class PackRow(NamedTuple):
    """One row."""

    number: int
    """Number of the row, from 0, which becomes the key of the sample."""
    image: object
    """The path of the image file, or what a cell has in its place: bytes, a path or a URL as text."""
    origin: str
    """Table and row, for messages."""
    captions: str | ValueError
    """A caption in each line; or why the row has none."""
    other: str
    """The other columns as JSON; empty if there are none."""
    table: str = ""
    """Path of the table, at whose folder a relative path of a cell starts."""
    bytes_in: tuple[str, ...] = ()
    """Other columns whose cells hold bytes, which JSON does not have: they are null there."""


def lines(captions: Callable[[], Captions]) -> str | ValueError:
    """Returns a row's captions, one a line; or why it has none."""
    try:
        return "\n".join(captions().texts)
    except ValueError as error:
        return error


class Rows(Protocol):
    """A table's rows."""

    @property
    def identity(self) -> object:
        """Value that changes with the rows."""

    def __len__(self) -> int: ...
    def part(self, begin: int, end: int) -> Iterable[PackRow]:
        """Returns the rows from `begin` up to `end`; picklable."""

    def image_bytes(self) -> Iterator[int]:
        """Yields the size of each row's image. Raises InputError, which names the row, for an address."""

    def problems(self, *, any_ending: bool, skip_bad: bool) -> Iterator[str]:
        """Yields what is wrong with the images, as far as it shows without reading them.

        With `any_ending` they are encoded anew; with `skip_bad` images may be missing.
        """


def rows_of_table(path: Path, data: Data) -> Rows:
    """Returns the rows of a table that `data` describes, by the ending of its name.

    Raises InputError for a table that cannot be read, and for a missing column.
    """
    texts = path.with_name(path.name.removesuffix(_IMAGES) + _TEXTS)
    if path.name.endswith(_IMAGES) and texts.is_file():
        return ImageLines.of(path, texts, data.empty_captions)
    if FORMATS[row_of(path.name).name].fields != "nested columns":
        columns = TableColumns.by(data)
        return TextRows(read_all_rows(path, columns, keep_others=True), columns)
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: the table cannot be read: it is {kind_of_file(path.stat())}, not a file")
    return GroupRows.of(path, data)


@dataclass(frozen=True)
class TextRows:
    """Rows of a .csv or .tsv table."""

    table: Table
    columns: TableColumns

    @property
    def identity(self) -> object:
        table = self.table
        return (str(table.path.absolute()), table.images, self._files, table.captions, table.others)

    @cached_property
    def _files(self) -> tuple[Stamp | None, ...]:
        """Size and time of each row's image file; None if it names none that is there.

        Each is asked for once: on a network file system that takes long.
        """
        return tuple(
            None if not name or is_url(name) else _stamp_of(self.table.image_path(row))
            for row, name in enumerate(self.table.images)
        )

    def __len__(self) -> int:
        return len(self.table.rows)

    def part(self, begin: int, end: int) -> tuple[PackRow, ...]:
        others = self.table.others or ({},) * len(self.table.rows)
        return tuple(
            PackRow(
                row,
                self._image(row),
                self.table.origin(row),
                lines(partial(self.table.captions_of, row)),
                _json(others[row]),
            )
            for row in range(begin, end)
        )

    def _image(self, row: int) -> Path | str | None:
        """Returns a row's image: its file, or its address; None if it has none."""
        name = self.table.images[row]
        if not name:
            return None
        return name if is_url(name) else self.table.image_path(row).absolute()

    def image_bytes(self) -> Iterator[int]:
        for row, (name, file) in enumerate(zip(self.table.images, self._files, strict=True)):
            _check_sized(name, self.table.origin(row))
            yield file.size if file else _inside(name)

    def problems(self, *, any_ending: bool, skip_bad: bool) -> Iterator[str]:
        table = self.table
        yield from [] if skip_bad else unfilled(table, self.columns)
        missing = [
            row
            for row, name, file in zip(table.rows, table.images, self._files, strict=True)
            if name and not is_url(name) and file is None
        ]
        if missing and not skip_bad:
            yield (
                f"{table.path}: image file missing in {list_rows(missing)}; relative paths start at "
                f"{table.path.parent.absolute()}{drive_advice(table.images)}"
            )
        unknown = [
            row
            for row, image in zip(table.rows, table.images, strict=True)
            if image and ending_of(image) not in IMAGE_ENDINGS and not is_url(image)
        ]
        if unknown and not any_ending:
            yield (
                f"{table.path}: an image is none of {allowed_endings()} in {list_rows(unknown)}: convert or "
                "remove these images"
            )


@dataclass(frozen=True)
class ImageLines:
    """Pictures of a file of Chinese-CLIP's, each with the texts that name it."""

    path: str
    places: tuple[tuple[int, str, tuple[str, ...]], ...]
    """Offset of each picture's line, its id and its captions."""
    empty: tuple[str, ...]
    version: object
    lost: int
    """Number of texts that name a picture which is not there."""
    begin: int = 0

    @classmethod
    def of(cls, path: Path, texts: Path, empty: tuple[str, ...]) -> "ImageLines":
        """Raises InputError for texts that are not as Chinese-CLIP writes them."""
        captions, number = dict[str, list[str]](), 0
        try:
            with texts.open(encoding="utf-8") as file:
                for text in file:
                    number += 1
                    row = parse_json(text)
                    for image in row["image_ids"]:
                        captions.setdefault(str(image), []).append(" ".join(str(row["text"]).split()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{texts}: line {number} has no text and image_ids, as Chinese-CLIP writes them: {error!r}"
            ) from None
        places = []
        with path.open("rb") as pictures:
            at = 0
            for line in pictures:
                name = line.partition(b"\t")[0].decode(errors="replace")
                places.append((at, name, tuple(captions.pop(name, ()))))
                at += len(line)
        lost = sum(map(len, captions.values()))
        version = (stamp(str(path)), stamp(str(texts)))
        return cls(str(path.absolute()), tuple(places), empty, version, lost)

    @property
    def identity(self) -> object:
        return (self.path, self.version)

    def __len__(self) -> int:
        return len(self.places)

    def part(self, begin: int, end: int) -> "ImageLines":
        return replace(self, places=self.places[begin:end], begin=begin)

    def __iter__(self) -> Iterator[PackRow]:
        with open(self.path, "rb") as file:
            for number, (at, name, captions) in enumerate(self.places, self.begin):
                file.seek(at)
                picture = file.readline().partition(b"\t")[2].decode("ascii", errors="replace").strip()
                texts = lines(partial(gathered, [captions], self.empty))
                yield PackRow(
                    number,
                    f"{INSIDE}{picture}",
                    f"{self.path}: image {name}",
                    texts,
                    _json({"image_id": name}),
                )

    def image_bytes(self) -> Iterator[int]:
        ends = [at for at, _, _ in self.places[1:]] + [os.path.getsize(self.path)]
        yield from ((end - at) * 3 // 4 for end, (at, _, _) in zip(ends, self.places, strict=True))

    def problems(self, *, any_ending: bool, skip_bad: bool) -> Iterator[str]:
        if self.lost and not skip_bad:
            yield (
                f"{self.path}: {many(self.lost, 'text')} beside it name pictures that it lacks: "
                "--skip-bad-rows leaves them out"
            )


@dataclass(frozen=True)
class GroupRows:
    """Rows of a Parquet or Arrow table."""

    path: str
    form: str
    sizes: tuple[int, ...]
    """Rows of each group."""
    columns: Columns
    others: tuple[str, ...]
    """Names of the columns that become JSON."""
    version: object
    begin: int = 0
    end: int = 0

    @classmethod
    def of(cls, path: Path, data: Data) -> "GroupRows":
        """Returns all rows of a table."""
        columns, name = Columns.by(data), str(path.absolute())
        used = {str(place[0]) for place in (columns.image, *(() if columns.templates else columns.captions))}
        with open_groups(name, row_of(name).name) as groups:
            check_columns(name, groups, [*columns.names, *groups.columns])
            return cls(
                name,
                row_of(name).name,
                tuple(groups.sizes),
                columns,
                tuple(column for column in groups.columns if column not in used),
                stamp(name),
                end=sum(groups.sizes),
            )

    @property
    def identity(self) -> object:
        return (self.path, self.version, self.columns, self.others)

    def __len__(self) -> int:
        return self.end - self.begin

    def part(self, begin: int, end: int) -> "GroupRows":
        return replace(self, begin=begin, end=end)

    def __iter__(self) -> Iterator[PackRow]:
        columns = self.columns
        names = list(dict.fromkeys([*columns.names, *self.others]))
        for number, cells in self._cells(names):
            others = {name: cells[name] for name in self.others}
            image = image_cell(cells, columns.image)
            yield PackRow(
                number,
                image,
                self._origin(number),
                lines(partial(captions_in, cells, columns.captions, columns.templates, columns.empty)),
                _json(others),
                self.path,
                tuple(name for name, cell in others.items() if _has_bytes(cell)),
            )

    def image_bytes(self) -> Iterator[int]:
        for number, cells in self._cells([str(self.columns.image[0])]):
            cell = image_cell(cells, self.columns.image)
            name = named_image(cell, self.path)
            _check_sized(name or "", self._origin(number))
            file = _stamp_of(name) if name else None
            yield len(cell) if isinstance(cell, bytes) else file.size if file else _inside(name or "")

    def problems(self, *, any_ending: bool, skip_bad: bool) -> Iterator[str]:
        return iter(())  # images lie in the table: each shows what is wrong with it when it is read

    def _origin(self, number: int) -> str:
        """Returns table and row, for messages."""
        return f"{self.path}: row {number + 1}"

    def _cells(self, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields number and cells of each row, read group by group. Raises StorageError as reading fails."""
        try:
            with open_groups(self.path, self.form) as groups:
                for group, last in enumerate(accumulate(self.sizes)):
                    first = last - self.sizes[group]
                    if first < self.end and last > self.begin:
                        begin, end = max(0, self.begin - first), min(last, self.end) - first
                        cells = islice(cells_of(groups, group, names), begin, end)
                        yield from enumerate(cells, start=first + begin)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read: {error.strerror or error}") from error


def _stamp_of(path: Path | str) -> Stamp | None:
    """Returns size and time of a file; None if there is no regular file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return Stamp(status.st_size, str(status.st_mtime_ns)) if stat.S_ISREG(status.st_mode) else None


def _check_sized(name: str, origin: str) -> None:
    """Raises InputError if an image is at an address: its size is known only when it is fetched."""
    if is_url(name) and not name.startswith(INSIDE):
        raise InputError(
            f"{origin}: --shard-mb cuts by the sizes of files, and its image is at an address: give "
            "--samples-per-shard instead"
        )


def _inside(name: str) -> int:
    """Returns the bytes of a picture that a cell holds in base64; 0 for others."""
    return len(name) * 3 // 4 if name.startswith(INSIDE) else 0


def ending_of(name: str) -> str:
    """Returns the ending of a file's name, without the dot, in lower case."""
    return Path(name).suffix.removeprefix(".").lower()


def allowed_endings() -> str:
    """Returns the endings of images that a job expects, for a message."""
    return ", ".join("." + ending for ending in IMAGE_ENDINGS)


def _json(cells: object) -> str:
    return json.dumps(cells, ensure_ascii=False, sort_keys=True, default=_plain) if cells else ""


def _has_bytes(cell: object) -> bool:
    """Returns whether a cell is bytes, or a list or a struct with some."""
    if isinstance(cell, list | tuple):
        return any(map(_has_bytes, cell))
    return _has_bytes(list(cell.values())) if isinstance(cell, dict) else isinstance(cell, bytes)


def _plain(value: object) -> str | None:
    """Returns a value that JSON does not have, such as a date, as text; None for bytes."""
    return None if isinstance(value, bytes) else str(value)


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
