"""Writes a job file with comments: sections in the order of the model, one key on a line."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import tomli_w

from trainer.config.job import Job
from trainer.config.keys import walk
from trainer.from_open_clip.translation import Setting
from trainer.text.terminal import one_line

WIDTH = 100


def job_text(settings: Mapping[str, Setting], begin: Sequence[str], end: Sequence[str]) -> str:
    """Returns the job file; `begin` and `end` are lines of comments."""
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
    if not isinstance(value, list):
        return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")
    items = [_value(item) for item in value]
    short = f"[{', '.join(items)}]"
    if len(short) <= WIDTH - 20:
        return short
    lines = [""]
    for item in items:
        if len(lines[-1]) + len(item) > WIDTH - 8 and lines[-1]:
            lines.append("")
        lines[-1] += f"{item}, "
    return "[\n" + "".join(f"    {line.rstrip()}\n" for line in lines) + "]"
