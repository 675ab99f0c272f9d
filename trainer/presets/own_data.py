"""Looks at own data for a first job file: their number, a held-out part, and a name. No torch."""

import csv
import io
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.formats import FORMATS, OTHER_COLUMNS, row_of
from trainer.errors import InputError
from trainer.text.paste import as_pattern, with_home
from trainer.text.terminal import say
from trainer.text.wording import many

if TYPE_CHECKING:
    from trainer.data.tables import Table

NONE = "none"
"""Value of --held-out for a job without an evaluation."""
_LARGEST = 4_000_000_000
"""Bytes of shards whose headers are all read; of more, the first one stands for the others."""
_SHARE, _MOST = 20, 1000
"""One pair in so many is held out, and at most so many."""
_HEADER = 2**16
"""Most characters of a header that are read."""
_FEWEST = 40
"""Pairs below which none is held out."""
_LARGEST_SHARE = 0.1
"""Share of the samples from which a held-out part is named."""
_NAMED_IN_A_LIST = 64
_EVERYONES = {"captions", "data", "dataset", "images", "pictures", "shards", "metadata", "train", "table"}
"""Names of files and folders that say nothing of what is in them."""


@dataclass(frozen=True)
class OwnData:
    """Own data, as a job file names them."""

    train: tuple[str, ...]
    held_out: tuple[str, ...] = ()
    """Captioned data to evaluate on."""
    samples: int | None = None
    """Number of training samples, if it is known."""
    about: str = ""
    """The number in words; empty if it is not known."""
    name: str = ""
    """Name for the run; empty if the data have none."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Further keys of [data], by which the tables are read."""
    tables: Mapping[Path, str] = field(default_factory=dict)
    """Text of tables that the entries name and that are not written yet."""


def own_data(pattern: str, held_out: str, job_path: Path, *, here: bool = True) -> OwnData:
    """Returns what the job file at `job_path` says of the data of a pattern, which starts at its folder.

    `held_out` is such a pattern, too, or NONE; empty: a part of the data is held out. `here` is false if only
    a cluster's nodes see the data. Raises InputError for files that are not there.
    """
    name = run_name(pattern, job_path)
    asked = () if held_out in ("", NONE) else (held_out,)
    if not here or "://" in pattern or pattern == "-" or pattern.startswith("pipe:"):
        return OwnData((pattern,), asked, name=name)
    from trainer.data.shard_names import expand_shards  # it imports pydantic

    folder = job_path.parent
    files = expand_shards([_path(pattern, folder)])
    others = expand_shards([_path(each, folder) for each in asked]) if asked else []
    if job_path.exists() and any(os.path.samefile(job_path, file) for file in (*files, *others)):
        raise InputError(f"{job_path} is a file of the data: give the job file another name")
    if not find_spec("numpy"):  # of a login node, which counts no samples
        return OwnData((pattern,), asked, name=name)
    try:
        return _looked_into(pattern, files, asked, job_path, name, cut=not held_out)
    except InputError as problem:
        say(f"warning: {problem}")
        return OwnData((pattern,), asked, name=name)


def _looked_into(
    pattern: str, files: list[str], asked: tuple[str, ...], job_path: Path, name: str, *, cut: bool
) -> OwnData:
    if cut and len(files) == 1 and FORMATS["table"] is row_of(files[0]):
        return _cut_table(Path(files[0]), job_path, name, pattern)
    keys = columns_of(files[0])
    sizes, exactly = _count(files, keys)
    samples = sum(sizes)
    if not samples:
        raise InputError(f"--data {pattern}: there is no sample in these files")
    held = _last(files, sizes) if cut else []
    folder = None if os.path.isabs(with_home(pattern)) else job_path.parent
    parts = [pattern_of(part, folder) for part in (files[: len(files) - len(held)], held)]
    train: tuple[str, ...] = (pattern,)
    if held and all(parts):
        train, asked = parts
        samples = sum(sizes[: -len(held)])
    about = f"{'' if exactly else 'about '}{many(samples, 'sample')}"
    return OwnData(train, asked, samples, about, name, keys)


def columns_of(file: str) -> dict[str, str]:
    """Returns the keys of [data] for the columns of a table, where they are not the default ones."""
    from trainer.data.row_groups import open_groups

    keys, form = dict[str, str](), row_of(file).name
    if form == "table":
        with open(file, encoding="utf-8-sig", errors="replace") as text:
            header = text.readline(_HEADER).rstrip("\r\n")
        if "\t" in header and "," not in header and not file.lower().endswith(".tsv"):
            keys["separator"] = "\t"
        names = re.split("[,\t]", header)
    elif form in ("parquet", "arrow"):
        with open_groups(file, form) as groups:
            names = list(groups.columns)
    else:
        return {}
    for usual, others in OTHER_COLUMNS.items():
        if usual not in names and (found := next(filter(names.__contains__, others), None)):
            keys[f"{usual}_column"] = found
    return keys


def run_name(pattern: str, job_path: Path) -> str:
    """Returns a name for the run: that of the table or the folder, if it says something."""
    path = Path(os.path.abspath(job_path.parent / pattern)) if "://" not in pattern else Path(pattern)
    for part in (path.stem, *(parent.name for parent in list(path.parents)[:2])):
        slug = re.sub(r"[^\w]+", "-", part.lower()).strip("-")
        plain = slug.removesuffix("-train")
        if len(plain) > 1 and plain not in _EVERYONES and not re.search(r"[*?{]|^[\d_-]+$", part):
            return plain[:60]
    return ""


def unwritten(tables: Mapping[Path, str]) -> dict[Path, str]:
    """Returns the tables that are not there yet. Raises InputError for one that is there with other rows.

    Nothing tells a table that an earlier `init` cut from one of the user's own, so none is ever replaced.
    """
    for path, text in tables.items():
        if os.path.lexists(path) and not _has(path, text):
            raise InputError(
                f"{path} exists already with other rows, and --force replaces the job file alone: if nobody "
                "needs it, remove it; or give a job file in another folder, which the tables lie beside"
            )
    return {path: text for path, text in tables.items() if not os.path.lexists(path)}


def _has(path: Path, text: str) -> bool:
    with suppress(OSError):
        return path.is_file() and path.read_bytes() == text.encode()
    return False


def _path(pattern: str, folder: Path) -> str:
    return os.path.normpath(os.path.join(as_pattern(folder), with_home(pattern)))


def _count(files: Sequence[str], keys: Mapping[str, str]) -> tuple[list[int], bool]:
    """Returns the number of samples of each file, and whether they are exact.

    Raises InputError for what is malformed.
    """
    from pydantic import ValidationError

    from trainer.config import Data
    from trainer.config.messages import problem_texts
    from trainer.data.check import check_data

    try:
        data = Data.model_validate({**keys, "train": tuple(files)})
    except ValidationError as error:
        raise InputError("\n".join(f"--data: {text}" for _, text in problem_texts(error))) from None
    if check_data(data, "--data") is not None:
        return [check_data(data.model_copy(update={"train": (file,)}), "--data") or 0 for file in files], True
    from trainer.data.indexed import index_in_memory
    from trainer.data.shards import shard_selection

    sizes = [os.path.getsize(file) for file in files]
    some = files if sum(sizes) <= _LARGEST else files[:1]
    found = [len(entry) for entry in index_in_memory(some, shard_selection(data)).entries]
    return (
        (found, True) if some is files else ([found[0] * size // max(1, sizes[0]) for size in sizes], False)
    )


def _last(files: list[str], sizes: Sequence[int]) -> list[str]:
    """Returns the files at the end that are held out; none if there is one file, or if they are few pairs."""
    samples = sum(sizes)
    if len(files) < 2 or samples < _FEWEST:
        return []
    wanted = min(samples // _SHARE, _MOST)
    count = next(count for count in range(1, len(files) + 1) if sum(sizes[-count:]) >= wanted)
    if (share := sum(sizes[-count:]) / samples) > _LARGEST_SHARE:
        say(
            f"{many(count, 'file')} of {len(files)} are held out, {share:.0%} of the samples, as files stay "
            "whole: for fewer, pack them into more files, or give --held-out"
        )
    return files[-count:]


def pattern_of(files: Sequence[str], folder: Path | None) -> tuple[str, ...]:
    """Returns entries of a job file in `folder` that name these files and no other.

    They are paths from there, or as the files are called without a folder. Returns () if they are too many.
    """
    names = [os.path.relpath(file, folder) for file in files] if folder is not None else list(files)
    found = [re.fullmatch(r"(.*?)(\d+)(\D*)", name) for name in names]
    numbers = [int(match[2]) for match in found if match]
    alike = {(match[1], len(match[2]), match[3]) for match in found if match}
    if len(numbers) == len(names) > 1 and len(alike) == 1 and _in_a_row(numbers):
        first, last = (match for match in (found[0], found[-1]) if match)
        return (f"{as_pattern(first[1])}{{{first[2]}..{last[2]}}}{as_pattern(first[3])}",)
    return tuple(map(as_pattern, names)) if len(names) <= _NAMED_IN_A_LIST else ()


def _in_a_row(numbers: Sequence[int]) -> bool:
    return list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))


def _cut_table(path: Path, job_path: Path, name: str, pattern: str) -> OwnData:
    """Returns a table in two parts, beside the job file; the rows of an image stay together."""
    from trainer.data.image_cells import is_url
    from trainer.data.tables import TableColumns, read_table

    keys = columns_of(str(path))
    columns = TableColumns(
        keys.get("image_column", "image"),
        (keys.get("caption_column", "caption"),),
        separator=keys.get("separator"),
    )
    table = read_table(path, columns, keep_others=True)
    rows: dict[str, list[int]] = {}
    for row in range(len(table.rows)):
        image = table.images[row]
        rows.setdefault(image if is_url(image) else os.path.normpath(image), []).append(row)
    images = list(rows.values())
    count = min(len(images) // _SHARE, _MOST) if len(images) >= _FEWEST else 0
    if not count:
        return OwnData((pattern,), (), len(table.rows), many(len(table.rows), "pair"), name, keys)
    chosen = {(2 * number + 1) * len(images) // (2 * count) for number in range(count)}
    parts: dict[str, list[int]] = {"train": [], "held-out": []}
    for place, of_image in enumerate(images):
        parts["held-out" if place in chosen else "train"] += of_image
    written = {
        job_path.parent / f"{path.stem}-{part}.csv": _text(table, sorted(of_part), job_path.parent)
        for part, of_part in parts.items()
    }
    train, held_out = (as_pattern(file.name) for file in written)
    samples = len(parts["train"])
    return OwnData((train,), (held_out,), samples, many(samples, "pair"), name, tables=written)


def _text(table: "Table", rows: Sequence[int], folder: Path) -> str:
    """Returns rows of a table as the text of a table in `folder`."""
    from trainer.data.image_cells import is_url

    file = io.StringIO()
    others = list(table.others[0]) if table.others else []
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["image", "caption", *others])
    for row in rows:
        image = table.images[row]
        if not is_url(image) and not os.path.isabs(image):
            image = os.path.relpath(table.image_path(row), folder)
        more = [table.others[row][name] for name in others]
        writer.writerow([image, table.captions[0][row], *more])
    return file.getvalue()
