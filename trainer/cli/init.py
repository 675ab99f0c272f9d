"""Makes the first job file of a user: a preset with its data, place, GPUs and model. Imports no torch."""

import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import tomli_w

from trainer.cli.near import NearChoice
from trainer.cli.presets import preset_text
from trainer.config.formats import SHARDS, row_of
from trainer.config.toml_lines import key_lines
from trainer.errors import InputError
from trainer.run.layout import JOB_FILE
from trainer.text.paste import word

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
_DOORS = ("here", "slurm", "kubernetes")


@dataclass(frozen=True)
class Wishes:
    """Answers of a user; an empty text, or None, leaves what the preset has."""

    preset: str
    data: str = ""
    """Pattern of shards, or a table, as it stands in the job file."""
    gpus: int | None = None
    """GPUs of each node."""
    model: str = ""


def job_text(wishes: Wishes, job_path: Path = Path(JOB_FILE)) -> str:
    """Returns the preset's text with the wishes in it; comments stay, with the job file's own name."""
    header, blank, rest = preset_text(wishes.preset).partition("\n\n")
    for words, instead in _OF_OTHER_DATA.items() if wishes.data else ():
        header = header.replace(words, instead)
    text = _PRESETS_FILE.sub(lambda _: word(job_path.name), header) + blank + rest
    if wishes.data:
        text = _with_data(text, wishes.data)
    if wishes.model:
        text = _with_value(text, "model", "name", _quoted(wishes.model))
    if wishes.gpus is not None:
        text = _with_value(text, "resources", "gpus_per_node", str(wishes.gpus))
    return text


def data_pattern(given: str, job_path: Path) -> str:
    """Returns what `data.train` says of a folder, a table or a pattern that the user names.

    Of a folder these are its shards, else its only table. A relative path then starts at the job file's
    folder. Raises InputError for a folder that has neither, or several tables.
    """
    path = Path(given)
    if path.is_dir():
        given = os.path.join(given, "*.tar") if any(path.glob("*.tar")) else _only_table(path, given)
    elif given.endswith("/") and "://" not in given:
        raise InputError(f"--data {given}: no such folder")
    elif row_of(given) is not SHARDS and not path.is_file():
        raise InputError(f"--data {given}: no such file")
    if "://" in given or given == "-" or given.startswith(("/", "~", "pipe:")):
        return given
    return os.path.relpath(given, job_path.parent)


def _only_table(folder: Path, given: str) -> str:
    tables = sorted(
        file.name for file in folder.iterdir() if file.is_file() and row_of(file.name) is not SHARDS
    )
    if len(tables) == 1:
        return os.path.join(given, tables[0])
    if tables:
        raise InputError(
            f"--data {given}: that folder has several tables, {', '.join(tables)}: name one of them"
        )
    raise InputError(
        f"--data {given}: there are neither shards (*.tar) nor a table (such as captions.csv) in that "
        "folder; a table has the columns image and caption, and `clipship pack` makes shards of it"
    )


def gpus_here() -> int:
    """Returns the number of NVIDIA GPUs whose device files this machine has."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def ask(job_path: Path, given: str = "") -> Wishes:
    """Asks four questions in the terminal: data (unless it is given), place, GPUs, model."""
    click.echo("Enter takes the answer in brackets.", err=True)
    question = "Data: shards (shards/) or a table (captions.csv); nothing: made-up pictures"

    def pattern_of(answer: str) -> str:
        return data_pattern(answer, job_path) if answer else ""

    pattern = pattern_of(given) if given else str(_asked(question, "", _checked(pattern_of)))
    door = _asked("Where it runs", "here", NearChoice(_DOORS))
    own = gpus_here() if door == "here" else tomllib.loads(preset_text(door))["resources"]["gpus_per_node"]
    gpus = int(_asked("GPUs on each node", str(own), click.IntRange(0, 64)))
    preset = door if door != "here" else "gpu" if gpus and pattern else "laptop"
    usual = tomllib.loads(preset_text(preset))["model"]["name"]

    def known(name: str) -> str:
        from trainer.model.catalog import check_model  # it imports pydantic

        check_model(str(job_path.parent / name) if name.endswith(".json") else name)
        return name

    model = _asked("Model, as open_clip names it", usual, _checked(known))
    return Wishes(preset, pattern, gpus or None, model)


def _checked(convert: Callable[[str], str]) -> Callable[[str], str]:
    """Returns the function as click takes it: after an answer that it refuses, the question comes again."""

    def converted(answer: str) -> str:
        try:
            return convert(answer.strip())
        except InputError as problem:
            raise click.UsageError(str(problem)) from None

    return converted


def _asked(
    question: str, default: str, kind: "click.ParamType[Any] | Callable[[str], str] | None" = None
) -> str:
    typed = {"type": kind} if isinstance(kind, click.ParamType) else {"value_proc": kind}
    answer = click.prompt(question, default=default, show_default=bool(default), err=True, **typed)
    return str(answer).strip()


def _with_data(text: str, pattern: str) -> str:
    lines = text.split("\n")
    if any(_MADE_UP.match(line) for line in lines):
        lines = [line for line in lines if not _MADE_UP.match(line)]
        place = lines.index("[data]") + 1
        lines.insert(place, f"train = {_quoted(pattern)}")
        return "\n".join(lines).replace("\n\n\n", "\n\n")
    return _with_value(text, "data", "train", _quoted(pattern))


def _with_value(text: str, section: str, key: str, value: str) -> str:
    """Returns the text with another value of a key on one line; its comment stays in its column."""
    lines, places = text.split("\n"), key_lines(text)
    if (section, key) in places:
        number = places[section, key] - 1
        before, mark, comment = lines[number].partition("  #")
        lines[number] = f"{before.partition('=')[0]}= {value}".ljust(len(before)) + mark + comment
        return "\n".join(lines)
    if (section,) in places:
        lines.insert(places[section,], f"{key} = {value}")
        return "\n".join(lines)
    return f"{text}\n[{section}]\n{key} = {value}\n"


def _quoted(text: str) -> str:
    return tomli_w.dumps({"v": text}).removeprefix("v = ").rstrip("\n")
