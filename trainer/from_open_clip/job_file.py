"""Turns a command line of open_clip_train into a job file. Reads no data; imports no torch."""

import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.job import Job
from trainer.config.keys import walk
from trainer.config.loader import job_from_table
from trainer.config.tables import toml_text
from trainer.errors import InputError
from trainer.from_open_clip.read import read
from trainer.from_open_clip.table import flags_of
from trainer.from_open_clip.translation import Setting, Translation
from trainer.text.masking import masked
from trainer.text.paste import command as paste
from trainer.text.terminal import one_line

WIDTH = 100
_ORIGIN = "this command line as a job"


def job_file(
    arguments: Sequence[str], gpus: int | None = None, release: str | None = None
) -> tuple[str, Translation]:
    """Returns the job file, and with it the flags that become no key or cannot be honoured.

    `release` is one of RELEASES; None finds it out, as `read` does.

    Raises InputError for a command line that open_clip_train or our loader refuses.
    """
    line = read(arguments, gpus, release)
    if not line["--train-data"] and line.format != "synthetic":
        raise InputError(
            "--train-data is missing: without it open_clip_train only evaluates, and `clipship eval` does "
            "that"
        )
    result = Translation()
    for flag in flags_of(line.release):
        flag.apply(line, result)
    if gpus is None and line.gpus == 1:
        result.notes.append("the global batch is that of 1 GPU: --gpus says how many there are")
    begin = [
        f"Written by `clipship from-open-clip` from a command line of open_clip_train {line.release}:",
        masked(paste(*arguments)),
        (
            f"Start it with `clipship run JOB --nproc {line.gpus}`, one rank for each GPU. Relative paths "
            "start at this file's folder."
        ),
    ]
    text = _job_text(result.settings, begin, [*result.notes, *result.left_out()])
    job_from_table(tomllib.loads(text), _ORIGIN)
    return text, result


def _job_text(settings: Mapping[str, Setting], begin: Sequence[str], end: Sequence[str]) -> str:
    """Returns the job file: sections in the order of the model, one key on a line.

    `begin` and `end` are lines of comments.
    """
    blocks = [_comments(begin)]
    sections: dict[str, list[str]] = {}
    for key, _ in walk(Job):
        if setting := settings.get(".".join(key)):
            sections.setdefault(".".join(key[:-1]), []).append(_line(key[-1], setting))
    for name, lines in sections.items():
        blocks.append("\n".join(([f"[{name}]"] if name else []) + lines))
    return "\n\n".join([*filter(None, blocks), *([_comments(end)] if end else [])]) + "\n"


def _comments(lines: Sequence[str]) -> str:
    return "\n".join(
        textwrap.fill(
            one_line(line), WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False
        )
        for line in lines
    )


def _line(name: str, setting: Setting) -> str:
    """Returns the key with its comment, beside it or above it."""
    text = f"{name} = {_value(setting.value)}"
    if not setting.comment:
        return text
    comment = f"# {one_line(setting.comment)}"
    beside = f"{text}  {comment}"
    return beside if len(beside) <= WIDTH and "\n" not in text else f"{comment}\n{text}"


def _value(value: Any) -> str:
    """Returns the value in TOML; a long list is wrapped."""
    short = toml_text(value)
    if not isinstance(value, list | tuple) or len(short) <= WIDTH - 20:
        return short
    lines = [""]
    for item in map(toml_text, value):
        if len(lines[-1]) + len(item) > WIDTH - 8 and lines[-1]:
            lines.append("")
        lines[-1] += f"{item}, "
    return "[\n" + "".join(f"    {line.rstrip()}\n" for line in lines) + "]"
