"""Fits lines into a terminal, whose own line breaks cut words. Files and pipes get whole lines. No torch."""

import os
import re
import textwrap
from typing import TextIO

_TOPIC = re.compile(r"\S+(?: \S+)* {2,}")
"""Matches what a line is about, up to the column of its text."""
_WIDEST_TOPIC = 14
_STEP = re.compile(r"step +\d+/")
_GAP = "  "
_LEAST_WANTED = ("data ", "scale ", "grad ", "epoch ", "lr ")
"""Beginnings of the parts that a step's line loses first; metrics.jsonl has them all."""
_LEAST = 20
"""Columns of a terminal below which lines stay whole."""


def fit_to(stream: TextIO, text: str) -> str:
    """Returns the text as lines that fit the terminal behind the stream, if there is one."""
    columns = terminal_columns(stream)
    if columns < _LEAST:
        return text
    return "".join(fitted(line, columns) for line in text.splitlines(keepends=True))


def terminal_columns(stream: TextIO) -> int:
    """Returns the width of the terminal behind the stream; 0 if there is none, or if it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):  # no file, or closed
        return 0


def fitted(line: str, columns: int) -> str:
    """Returns a line with line breaks between words, where it has more columns than that.

    The text goes on below its own first word. A step's line is cut short instead: it loses parts, the least
    wanted first. No word is broken, so that a path stays one word.
    """
    end = "\n" if line.endswith("\n") else ""
    line = line.removesuffix("\n")
    if len(line) <= columns:
        return line + end
    if _STEP.match(line):
        return _shorter_step(line, columns) + end
    topic = _TOPIC.match(line)
    indent = " " * (topic.end() if topic and topic.end() <= _WIDEST_TOPIC else len(_GAP))
    first = line[: len(indent)] if topic and len(indent) == topic.end() else ""
    folded = textwrap.fill(
        line[len(first) :],
        columns,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return folded + end


def _shorter_step(line: str, columns: int) -> str:
    parts = line.split(_GAP)
    for unwanted in _LEAST_WANTED:
        if len(_GAP.join(parts)) <= columns:
            break
        parts = [part for part in parts if not part.startswith(unwanted)]
    return _GAP.join(parts)
