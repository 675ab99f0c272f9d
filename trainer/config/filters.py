"""`data.filters`: conditions that a sample must fulfil, such as "min_side >= 256" or "clip_score >= 0.28".

    FILTER = NAME OPERATOR VALUE        OPERATOR is one of < <= > >= == !=
    VALUE  = number | true | false | text in quotes

A NAME is one of MEASURES, which an image's header tells, else a field of the sample: in shards a path into
its JSON as in `data.caption_key`, with the ending of the member before it if that is not "json"; in tables a
column. With `data.scores`, "scores:NAME" is a column there, and clip_score its cosine. Pure; opens no file.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from trainer.config.caption_key import EVERY, Path, parse_caption_key

MEASURES: Mapping[str, Callable[[int, int], float]] = {
    "width": lambda width, height: width,
    "height": lambda width, height: height,
    "min_side": min,
    "max_side": max,
    "max_aspect": lambda width, height: max(width, height) / min(width, height),
    "pixels": lambda width, height: width * height,
}
"""Functions of an image's width and height in pixels, by name. max_aspect is the longer side divided by the
shorter one."""
SCORES = "scores:"
"""Begin of a name that is a column of data.scores."""
CLIP_SCORE, LISTED = "clip_score", "listed"
"""The name that is such a column without that begin, and the one that says whether a sample has a row."""
BY_KEY = "key"
"""Value of data.scores_by: rows belong to samples by their keys, and not by a field."""
_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_FILTER = re.compile(
    r"\s*(?P<name>[^<>=!]*[^<>=!\s])\s*(?P<operator><=|>=|==|!=|<|>)\s*"
    r"(?:(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<truth>true|false)|"
    r"\"(?P<double>[^\"]*)\"|'(?P<single>[^']*)')\s*",
    re.DOTALL,
)
_FORM = (
    'write a name, one of < <= > >= == != and a number, true, false or a text in quotes: "min_side >= 256"'
)
Value = int | float | bool | str
RULES = 1
"""Number of the rules by which values are compared; an index by older ones is made again."""


class Filter(NamedTuple):
    """One condition."""

    text: str
    """The condition as messages and records show it."""
    name: str
    operator: str
    value: Value

    @property
    def measures(self) -> bool:
        """True if the name is one of MEASURES."""
        return self.name in MEASURES

    def holds(self, found: object) -> bool:
        """Returns whether the condition holds for a field's value.

        Raises ValueError if it cannot be compared, such as a text with a number; null and NaN always fail.
        """
        if found is None or found != found:
            return False
        if _kind(found) is not _kind(self.value):
            raise ValueError(
                f"{self.name} is {_words(found)}, which {self.text} compares with {self._wanted}"
            )
        return _OPERATORS[self.operator](found, self.value)

    def holds_for_text(self, cell: str) -> bool:
        """Returns whether the condition holds for a cell of text. Raises ValueError as `holds` does."""
        if isinstance(self.value, str) or not cell.strip():
            return self.holds(cell if isinstance(self.value, str) else None)
        return self.holds(_as_value(cell.strip()))

    @property
    def _wanted(self) -> str:
        return _words(self.value)


@cache
def parse_filter(text: str) -> Filter:
    """Returns the condition. Raises ValueError if it cannot be read."""
    match = _FILTER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} cannot be read: {_FORM}")
    name, sign = match["name"], match["operator"]
    quoted = match["double"] if match["double"] is not None else match["single"]
    value: Value = quoted if quoted is not None else _as_value(match["number"] or match["truth"])
    if _kind(value) is not float and sign not in ("==", "!="):
        raise ValueError(f"{text!r}: a text, true and false have no order: compare with == or !=")
    if name in MEASURES and _kind(value) is not float:
        raise ValueError(f"{text!r}: {name} is a number of the image")
    return Filter(" ".join(text.split()), name, sign, value)


def rules_of(filters: Sequence[str]) -> tuple[object, ...]:
    """Returns what an index knows the filters by, beside their text; nothing without any."""
    return (f"rules {RULES} of filters",) if filters else ()


def score_column(name: str) -> str | None:
    """Returns the column of data.scores that a name means, if the job has any; None for another name."""
    return name.removeprefix(SCORES) if name == CLIP_SCORE or name.startswith(SCORES) else None


def check_scored(condition: Filter) -> None:
    """Raises ValueError if a condition on a column of data.scores compares it with a text."""
    wanted = bool if score_column(condition.name) == LISTED else float
    if _kind(condition.value) not in (bool, wanted):
        words = "true or false" if wanted is bool else "a number, true or false"
        raise ValueError(f"filters: {condition.text}: {condition.name} is compared with {words}")


def check_in_shards(condition: Filter) -> None:
    """Raises ValueError if the condition's name is neither a measure nor a field of JSON."""
    if not condition.measures:
        filter_place(condition.name)


@cache
def filter_place(name: str) -> tuple[str, Path]:
    """Returns the member's ending and the path of a field in shards. Raises ValueError."""
    ending, colon, path = name.partition(":")
    key = parse_caption_key(f"{ending}:{path}" if colon else f"json:{name}")
    if key.path is None or EVERY in key.path:
        raise ValueError(
            f"{name} names no single field of a JSON member, such as clip_score or json:scores[0]"
        )
    return key.ending, key.path


def _as_value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):  # a number of an id is compared to its last digit
        with suppress(ValueError):
            return number(text)
    return text


def _kind(value: object) -> type:
    return bool if isinstance(value, bool) else float if isinstance(value, int | float) else type(value)


def _words(value: object) -> str:
    kinds = {bool: "true or false", float: "a number", str: "a text", dict: "an object", list: "a list"}
    return kinds.get(_kind(value), "another value")
