"""Makes a job file of a preset and a user's wishes: data, place, GPUs, model. Imports no torch."""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.formats import SHARDS, row_of
from trainer.config.tables import toml_text
from trainer.config.toml_lines import key_lines
from trainer.errors import InputError
from trainer.presets.files import preset_text
from trainer.presets.own_data import NONE, OwnData, own_data
from trainer.run.layout import JOB_FILE
from trainer.text.paste import as_pattern, with_home, word
from trainer.text.terminal import one_line

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
