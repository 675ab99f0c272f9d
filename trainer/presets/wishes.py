"""Makes a job file of a preset and a user's wishes: data, place, GPUs, model. Imports no torch.

Own data are looked at first: their number, a held-out part, and a name.
"""

import csv
import io
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.formats import FORMATS, OTHER_COLUMNS, SHARDS, row_of
from trainer.config.tables import toml_text
from trainer.config.toml_lines import key_lines
from trainer.errors import InputError
from trainer.presets.files import preset_text
from trainer.run.layout import JOB_FILE
from trainer.text.paste import as_pattern, with_home, word
from trainer.text.terminal import one_line, say
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


_MADE_UP = re.compile(r'(format = "synthetic"|synthetic_samples = |# Your own data instead|# train = )')
"""Beginnings of a preset's lines on made-up pictures, which own data take the place of."""
_OF_OTHER_DATA = {
    "on made-up pictures": "on your own pictures",
    "on CC3M": "on your own pictures",
    " `--data shards/` or the key train names them.": "",
}
"""Words of presets' first lines that own data make wrong, and what stands there then."""
_PRESETS_FILE = re.compile(r"\b(job|cc3m)\.toml\b")
"""Names that a preset's first comment has for the job file."""
_EVALUATION = ("# retrieval = ", "# every_epochs = ")
"""Beginnings of a preset's lines that the held-out data take the place of."""
_RANKS_HERE = 2
"""Ranks of a preset that asks for no GPUs."""
_FEWEST_STEPS = 1000
"""Steps that a preset which counts steps is to have at least on own data."""


@dataclass(frozen=True)
class Wishes:
    """Answers of a user; an empty text, or None, leaves what the preset has."""

    preset: str
    data: str = ""
    """Pattern of shards, or a table, as it stands in the job file."""
    gpus: int | None = None
    """GPUs of each node."""
    model: str = ""
    own: OwnData | None = None
    """Facts about the data, if they could be looked at."""


@dataclass(frozen=True)
class Lengths:
    """Batch and length of a run that fit the number of its samples."""

    batch: int
    epochs: int
    warmup_steps: int


def lengths(preset: Mapping[str, Any], samples: int, ranks: int) -> Lengths:
    """Returns a preset's batch, epochs and warm-up, made smaller where there are fewer samples.

    An epoch has ten steps at least, where the data allow it, the ranks share a batch equally, and the warm-up
    is a tenth of the run at most. A preset that counts steps gets as many epochs as they are, at most 30.
    """
    optim = preset["optim"]
    batch = min(optim["global_batch_size"], max(8, 1 << max(0, (samples // 10).bit_length() - 1)), samples)
    batch = max(1, batch // ranks) * ranks
    epoch_steps = max(1, samples // batch)
    steps = max(_FEWEST_STEPS, optim.get("steps", 0))
    epochs = optim.get("epochs") or min(30, max(1, steps // epoch_steps))
    return Lengths(batch, epochs, min(optim["warmup_steps"], max(1, epochs * epoch_steps // 10)))


def job_text(wishes: Wishes, job_path: Path = Path(JOB_FILE)) -> str:
    """Returns the preset's text with the wishes in it; comments stay, with the job file's own name."""
    header, blank, rest = preset_text(wishes.preset).partition("\n\n")
    for words, instead in _OF_OTHER_DATA.items() if wishes.data else ():
        header = header.replace(words, instead)
    text = _PRESETS_FILE.sub(lambda _: one_line(word(job_path.name)), header) + blank + rest
    if wishes.data:
        text = _with_data(text, wishes.data)
    if wishes.model:
        text = _with_value(text, "model", "name", toml_text(wishes.model))
    if wishes.gpus is not None:
        text = _with_value(text, "resources", "gpus_per_node", str(wishes.gpus))
    return text if wishes.own is None else _as_the_data_say(text, wishes.preset, wishes.own)


def _as_the_data_say(text: str, preset: str, own: OwnData) -> str:
    """Returns the text with what is known of the data: entries, evaluation, name, batch and length."""
    about = f"  # {own.about}, counted by clipship init" if own.about else ""
    text = _with_line(text, "data", "train", f"train = {_entries(own.train)}{about}")
    for key, value in own.keys.items():
        text = _with_value(text, "data", key, toml_text(value))
    text = _with_evaluation(text, own.held_out)
    if own.name:
        text = _with_name(text, tomllib.loads(preset_text(preset))["name"], own.name)
    return text if own.samples is None else _with_lengths(text, own.samples)


def _with_name(text: str, usual: str, name: str) -> str:
    line = re.compile(rf'^name = "{re.escape(usual)}" *', re.MULTILINE)
    text = line.sub(lambda found: f'name = "{name}"'.ljust(len(found[0]) - 1) + " ", text, count=1)
    return text.replace(usual, name)


def _with_lengths(text: str, samples: int) -> str:
    """Returns the text with a batch, epochs and a warm-up that fit the number of samples."""
    table = tomllib.loads(text)
    resources, optim = table.get("resources", {}), table["optim"]
    fits = lengths(table, samples, resources.get("nodes", 1) * resources.get("gpus_per_node", _RANKS_HERE))
    lines = {"steps": f"epochs = {fits.epochs}  # passes over the data; or steps"}
    if fits.batch != optim["global_batch_size"]:
        batch = "samples of one step over all ranks: few, as the data are"
        lines["global_batch_size"] = f"global_batch_size = {fits.batch}  # {batch}"
        if isinstance(most := optim.get("max_batch_size_per_gpu"), int):
            lines["max_batch_size_per_gpu"] = (
                f"max_batch_size_per_gpu = {most}  # a larger share of a rank is accumulated"
            )
    for key, line in lines.items():
        text = _with_line(text, "optim", key, line)
    return _with_value(text, "optim", "warmup_steps", str(fits.warmup_steps))


def _entries(entries: Sequence[str]) -> str:
    return toml_text(entries[0] if len(entries) == 1 else list(entries))


def _with_evaluation(text: str, held_out: Sequence[str]) -> str:
    """Returns the text with the held-out pairs in place of the preset's evaluation, of other data."""
    for key in ("zero_shot", "class_names", "templates"):
        text = _with_line(text, "eval", key, None)
    if not held_out:
        return text
    text = "\n".join(line for line in text.split("\n") if not line.startswith(_EVALUATION))
    if ("eval",) not in key_lines(text):
        text = text.replace("\n[logging]\n", "\n[eval]\n\n[logging]\n", 1)
    text = _with_value(text, "eval", "every_epochs", "1")
    return _with_value(text, "eval", "retrieval", _entries(held_out))


def _with_line(text: str, section: str, key: str, line: str | None) -> str:
    """Returns the text with another line for a key, or without it for None; as it is if it lacks the key."""
    lines, places = text.split("\n"), key_lines(text)
    if (section, key) not in places:
        return text
    number = places[section, key] - 1
    lines[number : number + 1] = [] if line is None else [line]
    return "\n".join(lines)


def data_pattern(given: str, job_path: Path, *, here: bool = True) -> str:
    """Returns what `data.train` says of a folder, a table or a pattern that the user names.

    Of a folder these are its shards, else its only table. A relative path then starts at the job file's
    folder. Raises InputError for a folder that has neither, or several tables, and for data that are not
    there, unless they are not `here`.
    """
    path = Path(given)
    elsewhere = "://" in given or given == "-" or given.startswith("pipe:") or not here
    if path.is_dir():
        given = os.path.join(as_pattern(given), _files_in(path, given))
    elif given.endswith("/") and not elsewhere:
        raise InputError(f"--data {given}: no such folder{_NO_DATA}")
    elif not elsewhere:
        _check_there(given)
        if os.path.isfile(os.path.expanduser(given)):
            given = as_pattern(given)
    if "://" in given or given == "-" or given.startswith(("/", "~", "pipe:")):
        return given
    return os.path.normpath(os.path.join(as_pattern(os.path.relpath(".", job_path.parent)), given))


_NO_DATA = "; with --no-data it is taken as it is, for data that only the cluster's nodes see"


def _check_there(given: str) -> None:
    from trainer.data.shard_names import expand_shards  # it imports pydantic

    try:
        expand_shards([with_home(given)])
    except InputError as problem:
        raise InputError(f"--data {problem}{_NO_DATA}") from None


def _files_in(folder: Path, given: str) -> str:
    """Returns the pattern of a folder's shards, or of its Parquet files, or else its only table."""
    if shards := next((ending for ending in ("*.tar", "*.parquet") if any(folder.glob(ending))), ""):
        return shards
    tables = sorted(
        file.name for file in folder.iterdir() if file.is_file() and row_of(file.name) is not SHARDS
    )
    if len(tables) == 1:
        return as_pattern(tables[0])
    if tables:
        raise InputError(
            f"--data {given}: that folder has several tables, {', '.join(tables)}: name one of them"
        )
    raise InputError(
        f"--data {given}: there are neither shards (*.tar) nor a table (such as captions.csv) in that "
        "folder; a table has the columns image and caption, and `clipship pack` makes shards of it"
    )


def wishes_of(preset: str, data: str, held_out: str, job_path: Path, *, here: bool) -> Wishes:
    """Returns what the options ask for. Raises InputError for data that are not there."""
    if not data:
        if held_out:
            raise InputError("--held-out belongs to --data, which is not given")
        return Wishes(preset)
    pattern = data_pattern(data, job_path, here=here)
    held_out = held_out if held_out in ("", NONE) else data_pattern(held_out, job_path, here=here)
    return Wishes(preset, pattern, own=own_data(pattern, held_out, job_path, here=here))


def _with_data(text: str, pattern: str) -> str:
    lines = text.split("\n")
    if any(_MADE_UP.match(line) for line in lines):
        lines = [line for line in lines if not _MADE_UP.match(line)]
        place = lines.index("[data]") + 1
        lines.insert(place, f"train = {toml_text(pattern)}")
        return "\n".join(lines).replace("\n\n\n", "\n\n")
    return _with_value(text, "data", "train", toml_text(pattern))


def _with_value(text: str, section: str, key: str, value: str) -> str:
    """Returns the text with another value of a key on one line; its comment stays in its column."""
    lines, places = text.split("\n"), key_lines(text)
    if (section, key) in places:
        number = places[section, key] - 1
        before, mark, comment = lines[number].partition("  #")
        line = f"{before.partition('=')[0]}= {value}".ljust(len(before)) + mark + comment
        lines[number] = line.rstrip()
        return "\n".join(lines)
    if (section,) in places:
        lines.insert(places[section,], f"{key} = {value}")
        return "\n".join(lines)
    return f"{text}\n[{section}]\n{key} = {value}\n"
