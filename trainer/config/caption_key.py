"""`data.caption_key`: the member that holds a sample's captions and, for JSON, the path of the field in it.

    KEY  = ENDING | JSON ":" PATH       JSON ends in "json", such as json or meta.json
    PATH = STEP { "." NAME | "[" NUMBER "]" | "[*]" }
    STEP = NAME | "[" NUMBER "]" | "[*]"

A NAME is a key of an object: any characters but . [ ]. A NUMBER is a place in a list, counted from 0; * is
every place. Pure; opens no file.
"""

import re
from functools import cache
from typing import Final, NamedTuple

EVERY: Final = None
"""Step that takes every element of a list."""
Step = str | int | None
"""Key of an object, place in a list, or EVERY."""

MOST_STEPS = 32
"""Largest number of steps of a path."""

_JSON = re.compile(r"(?:^|\.)json$", re.IGNORECASE)
_JSON_LINES = re.compile(r"(?:^|\.)jsonl(?::|$)", re.IGNORECASE)
_STEP = re.compile(r"(?:^|(?<=.)\.)(?P<name>[^.\[\]]+)|\[(?:(?P<number>[0-9]{1,9})|\*)\]", re.DOTALL)


class CaptionKey(NamedTuple):
    """Place of a sample's captions."""

    ending: str
    """Ending of the member."""
    path: tuple[Step, ...] | None = None
    """Steps to the field, if the member is JSON; None for plain text with one caption per line."""


@cache
def parse_caption_key(key: str) -> CaptionKey:
    """Returns the parts of the key. Raises ValueError for JSON without a path, and for a malformed path."""
    ending, colon, path = key.partition(":")
    if _JSON_LINES.search(key):
        raise ValueError(
            f"{key} is JSON lines, which no sample has: name a member with one object, such as json:caption"
        )
    if not _JSON.search(ending):
        return CaptionKey(key)
    if not colon:
        raise ValueError(
            f"{key} is JSON, and each line of its text would become a caption: name the field too, such as "
            f"{key}:caption, or {key}:captions[*] for every text of a list"
        )
    return CaptionKey(ending.lower(), _steps(key, path))


def path_text(path: tuple[Step, ...]) -> str:
    """Returns the steps as a job file writes them."""
    steps = (f".{step}" if isinstance(step, str) else f"[{'*' if step is EVERY else step}]" for step in path)
    return "".join(steps).removeprefix(".")


def _steps(key: str, path: str) -> tuple[Step, ...]:
    steps: list[Step] = []
    place = 0
    while match := _STEP.match(path, place):
        number = match["number"]
        steps.append(match["name"] or (EVERY if number is None else int(number)))
        place = match.end()
    if not steps or place < len(path) or len(steps) > MOST_STEPS:
        raise ValueError(
            f"{key}: the path of the field cannot be read at {path[place:] or 'its end'!r}: write names with "
            "dots between them, and places of a list in brackets, such as json:caption, json:captions[*] or "
            f"json:meta.texts[0]; at most {MOST_STEPS} steps"
        )
    return tuple(steps)
