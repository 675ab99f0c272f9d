"""Reads captions from the bytes of a sample's member, plain text or JSON, and chooses one. No torch."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any

from trainer.config import Data
from trainer.config.caption_key import EVERY, Step, parse_caption_key, path_text
from trainer.text.wording import many

MOST_JSON_BYTES = 2**24
"""Largest JSON that is parsed; in memory it takes up to 30 times as much."""
_SHOWN_FIELDS = 12
_SHOWN_LETTERS = 60
_KINDS = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}


@dataclass(frozen=True)
class CaptionReader:
    """Function from the bytes of a member to its captions.

    Raises ValueError if they hold none; the message follows shard and sample.
    """

    path: tuple[Step, ...] | None = None
    """Steps to the field, if the member is JSON; None for plain text with one caption per line."""
    encoding: str = "utf-8"

    @classmethod
    def by(cls, data: Data) -> "CaptionReader":
        """Returns the reader that the job asks for."""
        return cls(parse_caption_key(data.caption_key).path, data.encoding)

    def __call__(self, content: bytes) -> tuple[str, ...]:
        if self.path is not None and len(content) > MOST_JSON_BYTES:
            raise ValueError(
                f"its JSON has {many(len(content), 'byte')}, and at most {MOST_JSON_BYTES:,} are parsed"
            )
        text = decoded(content, self.encoding)
        if self.path is None:
            captions = tuple(line.strip() for line in text.split("\n") if line.strip())
        else:
            captions = tuple(_texts(_parsed(text), self.path))
        if not captions:
            raise ValueError("captions are empty")
        return captions


LINES = CaptionReader()
"""Reader of plain UTF-8 text with one caption per line."""


def decoded(content: bytes, encoding: str) -> str:
    """Returns the text. Raises ValueError, which names the key that sets the encoding."""
    try:
        return content.decode("utf-8-sig" if encoding == "utf-8" else encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"captions are not {encoding.upper()} ({error.reason} at byte {error.start}); if they have "
            'another encoding, name it: data.encoding = "gb18030" in a job, --encoding in a command'
        ) from error


def random_caption(captions: Sequence[str], seed: int) -> str:
    """Returns a caption that the seed draws."""
    return captions[seed % len(captions)]


def first_caption(captions: Sequence[str], seed: int) -> str:
    """Returns the first caption, whatever the seed."""
    return captions[0]


def longest_caption(captions: Sequence[str], seed: int) -> str:
    """Returns the first of those with the most characters."""
    return max(captions, key=len)


Choice = Callable[[Sequence[str], int], str]
"""Function from a sample's captions and a seed to one of them."""
CHOICES: Mapping[str, Choice] = {
    "random": random_caption,
    "first": first_caption,
    "longest": longest_caption,
}
"""Functions by the values of data.caption_choice."""


def _parsed(text: str) -> Any:
    """Returns the JSON value.

    NaN is allowed, since img2dataset writes it. Raises ValueError for anything that is no JSON, or that is
    ambiguous or too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"its JSON cannot be read: {error}") from error
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"its JSON has the field {_short(twice)} twice")
    return found


def _texts(value: Any, path: tuple[Step, ...]) -> Iterator[str]:
    """Yields the texts at the path, each in one line; null and empty texts are passed over."""
    for found in _values(value, path, 0):
        if found is None:
            continue
        if not isinstance(found, str):
            advice = f": {path_text(path)}[*] takes every text of it" if isinstance(found, list) else ""
            raise ValueError(f"its JSON has {_kind(found)} at {path_text(path)}, not a text{advice}")
        line = " ".join(found.split())
        try:
            line.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the text at {path_text(path)} has half a character (a surrogate)") from None
        if line:
            yield line


def _values(value: Any, path: tuple[Step, ...], done: int) -> Iterator[Any]:
    """Yields the values at the path. Raises ValueError, which says where it ends too early."""
    if done == len(path):
        yield value
        return
    step, here = path[done], path_text(path[:done]) or "its top"
    if isinstance(step, str):
        if not isinstance(value, dict):
            raise ValueError(f"its JSON has {_kind(value)} at {here}, not an object with the field {step}")
        if step not in value:
            raise ValueError(_no_field(value, here, step))
        yield from _values(value[step], path, done + 1)
        return
    if not isinstance(value, list):
        raise ValueError(f"its JSON has {_kind(value)} at {here}, not a list")
    if step is EVERY:
        for element in value:
            yield from _values(element, path, done + 1)
    elif step < len(value):
        yield from _values(value[step], path, done + 1)
    else:
        raise ValueError(f"its JSON has a list of {len(value)} at {here}, so there is no [{step}]")


def _no_field(value: Mapping[str, Any], here: str, step: str) -> str:
    near = get_close_matches(step, [name for name in islice(value, 100) if len(name) <= _SHOWN_LETTERS], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    names = ", ".join(_short(name) for name in list(value)[:_SHOWN_FIELDS]) or "none"
    more = f" and {len(value) - _SHOWN_FIELDS} more" if len(value) > _SHOWN_FIELDS else ""
    return f"its JSON has no field {step} at {here}{hint} (its fields: {names}{more})"


def _short(name: str) -> str:
    return name if len(name) <= _SHOWN_LETTERS else f"{name[:_SHOWN_LETTERS]}..."


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return _KINDS.get(type(value), "a text")
