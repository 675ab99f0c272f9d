"""`data.caption_key`: the member that holds a sample's captions and, for JSON, the path of the field in it.

    KEY  = ENDING | JSON ":" PATH       JSON ends in "json", such as json or meta.json
    PATH = STEP { "." NAME | "[" NUMBER "]" | "[*]" }
    STEP = NAME | "[" NUMBER "]" | "[*]"

Several keys name several places in one member. A NAME is a key of an object: any characters but . [ ], or any
in double quotes, where "" stands for one. A NUMBER is a place in a list, counted from 0; * is every place.
Pure; opens no file.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

EVERY: Final = None
"""Step that takes every element of a list."""
Step = str | int | None
"""Key of an object, place in a list, or EVERY."""
Path = tuple[Step, ...]
"""Steps from the top of a JSON value to a field."""

PLAIN = ("txt",)
"""Default of the job's keys."""
MOST_STEPS = 32
"""Largest number of steps of a path."""

_JSON = re.compile(r"(?:^|\.)json$", re.IGNORECASE)
_JSON_LINES = re.compile(r"(?:^|\.)jsonl(?::|$)", re.IGNORECASE)
_NAME = r'(?:"(?P<quoted>(?:[^"]|"")+)"|(?P<name>[^.\[\]]+))'
_STEP = re.compile(rf"(?:^|(?<=.)\.){_NAME}|\[(?:(?P<number>[0-9]{{1,9}})|\*)\]", re.DOTALL)


class CaptionKey(NamedTuple):
    """A place of a sample's captions."""

    ending: str
    """Ending of the member."""
    path: Path | None = None
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
    return CaptionKey(ending.lower(), parse_path(key, path))


class CaptionKeys(NamedTuple):
    """The places of a sample's captions, all in one member."""

    ending: str
    """Ending of the member."""
    paths: tuple[Path, ...] | None = None
    """A path for each key, if the member is JSON; None for plain text with one caption per line."""


def parse_caption_keys(keys: Sequence[str], *, templates: bool = False) -> CaptionKeys:
    """Returns the member and the paths. Raises ValueError as `parse_caption_key` does.

    With `templates`, which have the paths, the key is the ending of a JSON member alone; PLAIN, the
    default, then stands for "json".
    """
    if templates:
        return CaptionKeys(_ending_for_templates(keys), ())
    parsed = [parse_caption_key(key) for key in keys]
    paths = tuple(key.path for key in parsed if key.path is not None)
    if len(parsed) > 1 and (len({key.ending for key in parsed}) > 1 or not paths):
        raise ValueError(
            f"{', '.join(keys)} are several members, and a sample's captions lie in one: name paths of one "
            'JSON, such as ["json:caption", "json:alt"]'
        )
    return CaptionKeys(parsed[0].ending, paths or None)


def _ending_for_templates(keys: Sequence[str]) -> str:
    if tuple(keys) == PLAIN:
        return "json"
    ending = keys[0].lower()
    if len(keys) > 1 or ":" in ending or not _JSON.search(ending):
        raise ValueError(
            f"{', '.join(keys)}: caption_template names the fields, so caption_key is the ending of a JSON "
            'member alone, such as "json"'
        )
    return ending


def column_path(key: str, name: str) -> Path:
    """Returns the path of a value in the rows of a table, which begins with a column. Raises ValueError.

    Messages say that `key` of the job has the name.
    """
    path = parse_path(f"{key} = {name}", name)
    if not isinstance(path[0], str):
        raise ValueError(f"{key} = {name} begins with no column: name one, such as captions[*]")
    return path


def one_column_path(key: str, name: str) -> Path:
    """Returns the path of a single value in the rows of a table. Raises ValueError."""
    path = column_path(key, name)
    if EVERY in path:
        raise ValueError(f"{key} = {name} names several values: name one, such as [0]")
    return path


def path_text(path: Path) -> str:
    """Returns the steps as a job file writes them."""
    steps = (
        f".{_quoted(step)}" if isinstance(step, str) else f"[{'*' if step is EVERY else step}]"
        for step in path
    )
    return "".join(steps).removeprefix(".")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"' if re.search(r'[.\[\]"]', name) else name


def parse_path(key: str, path: str) -> Path:
    """Returns the steps of a path, which messages show as part of `key`. Raises ValueError."""
    steps: list[Step] = []
    place = 0
    while match := _STEP.match(path, place):
        number = match["number"]
        name = (match["quoted"] or "").replace('""', '"') or match["name"]
        steps.append(name or (EVERY if number is None else int(number)))
        place = match.end()
    if not steps or place < len(path) or len(steps) > MOST_STEPS:
        raise ValueError(
            f"{key}: the path of the field cannot be read at {path[place:] or 'its end'!r}: write names with "
            "dots between them, and places of a list in brackets, such as json:caption, json:captions[*] or "
            f"json:meta.texts[0]; at most {MOST_STEPS} steps"
        )
    return tuple(steps)
