"""Reads captions from the bytes of a sample's member, plain text or JSON, and chooses one. No torch."""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

from trainer.config import Data
from trainer.config.caption_key import EVERY, Path, path_text
from trainer.config.caption_template import Template, field_path, filled, parse_template
from trainer.data.sample import BadSample, RawSample
from trainer.text.near import did_you_mean
from trainer.text.wording import many

MOST_JSON_BYTES = 2**24
"""Largest JSON that is parsed; in memory it takes up to 30 times as much."""
_SHOWN_FIELDS = 12
_SHOWN_LETTERS = 60
_KINDS = {
    dict: "an object", list: "a list", str: "a text", bytes: "bytes", bool: "true or false", int: "a number",
    float: "a number",
}  # fmt: skip


class Captions(NamedTuple):
    """The captions of a sample, in the order of the keys that they come from."""

    texts: tuple[str, ...]
    counts: tuple[int, ...] = ()
    """Number of texts of each key; empty if there is one key."""


@dataclass(frozen=True)
class CaptionReader:
    """Function from the bytes of a member to its captions.

    Raises ValueError if they hold none; the message follows shard and sample.
    """

    paths: tuple[Path, ...] | None = None
    """Paths of the fields, if the member is JSON; None for plain text, by default with a caption per line."""
    templates: tuple[Template, ...] = ()
    """Captions made of several fields, instead of the paths."""
    encoding: str = "utf-8"
    one: bool = False
    """True if all lines of a plain text are one caption."""
    empty: tuple[str, ...] = ()
    """Texts that count as no caption."""

    @classmethod
    def by(cls, data: Data) -> "CaptionReader":
        """Returns the reader that the job asks for."""
        templates = tuple(map(parse_template, data.caption_template))
        one = data.caption_lines == "one"
        return cls(data.caption_keys.paths, templates, data.encoding, one, data.empty_captions)

    def __call__(self, content: bytes) -> Captions:
        if self.paths is not None and len(content) > MOST_JSON_BYTES:
            raise ValueError(
                f"its JSON has {many(len(content), 'byte')}, and at most {MOST_JSON_BYTES:,} are parsed"
            )
        text = decoded(content, self.encoding)
        if self.paths is None and self.one:
            return gathered([[" ".join(text.split())]], self.empty)
        if self.paths is None:
            return gathered([[line.strip() for line in text.split("\n")]], self.empty)
        return captions_in(_parsed(text), self.paths, self.templates, self.empty)


LINES = CaptionReader()
"""Reader of plain UTF-8 text with one caption per line."""


def captions_in(
    value: Any, paths: Sequence[Path], templates: Sequence[Template], empty: Collection[str]
) -> Captions:
    """Returns the captions at the paths of a JSON value, or those that the templates make of its fields.

    Raises ValueError if a field is missing or of another kind, and if no text is left.
    """
    return gathered(
        [[filled(template, lambda field: _field(value, field, empty))] for template in templates]
        or [list(_texts(value, path)) for path in paths],
        empty,
    )


class StandsForNone(ValueError):
    """Raised for captions of which one is a word of data.empty_captions, and no other has a text."""


def gathered(by_key: Sequence[Sequence[str]], empty: Collection[str]) -> Captions:
    """Returns the texts of all keys that are neither empty nor in `empty`. Raises ValueError if none is."""
    texts = [[text for text in of_key if text and text not in empty] for of_key in by_key]
    if not any(texts):
        for word in filter(None, chain.from_iterable(by_key)):
            raise StandsForNone(f"caption {word!r}")
        raise ValueError("captions are empty")
    return Captions(tuple(chain.from_iterable(texts)), tuple(map(len, texts)) if len(texts) > 1 else ())


def bad_captions(origin: str, key: str, error: ValueError) -> BadSample:
    """Returns a sample whose captions cannot be used; those that stand for none are counted by their word."""
    if isinstance(error, StandsForNone):
        return BadSample(origin, key, str(error), f"{error} stands for none (data.empty_captions)")
    return BadSample(origin, key, "bad captions", str(error))


def decoded(content: bytes, encoding: str) -> str:
    """Returns the text. Raises ValueError, which names the key that sets the encoding."""
    try:
        return content.decode("utf-8-sig" if encoding == "utf-8" else encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"captions are not {encoding.upper()} ({error.reason} at byte {error.start}); if they have "
            'another encoding, name it: data.encoding = "gb18030" in a job, --encoding in a command'
        ) from error


def random_caption(sample: RawSample, seed: int) -> str:
    """Returns a caption that the seed draws."""
    return sample.captions[seed % len(sample.captions)]


def first_caption(sample: RawSample, seed: int) -> str:
    """Returns the first caption, whatever the seed."""
    return sample.captions[0]


def longest_caption(sample: RawSample, seed: int) -> str:
    """Returns the first of those with the most characters."""
    return max(sample.captions, key=len)


@dataclass(frozen=True)
class WeightedCaption:
    """Draws a key by its weight among those that the sample has captions of, and one of these captions."""

    weights: tuple[float, ...]
    """Weight of each key, above 0."""

    def __call__(self, sample: RawSample, seed: int) -> str:
        counts = sample.caption_counts or (len(sample.captions),)  # made-up samples know one key alone
        held = (weight * bool(count) for weight, count in zip(self.weights, counts, strict=False))
        ends = list(accumulate(held))
        # The upper bits of the seed, which has 63, draw the key, and the lower ones the caption.
        key = bisect_right(ends, (seed >> 10) / 2**53 * ends[-1])
        return sample.captions[sum(counts[:key]) + seed % counts[key]]


Choice = Callable[[RawSample, int], str]
"""Function from a sample and a seed to one of its captions; picklable."""
CHOICES: Mapping[str, Choice] = {
    "random": random_caption,
    "first": first_caption,
    "longest": longest_caption,
}
"""Functions by the values of data.caption_choice."""


def choice_by(data: Data) -> Choice:
    """Returns the choice that the job asks for."""
    return WeightedCaption(data.caption_weights) if data.caption_weights else CHOICES[data.caption_choice]


def parsed_json(content: bytes) -> Any:
    """Returns the JSON value of a member in UTF-8. Raises ValueError, as for captions."""
    return _parsed(decoded(content, "utf-8"))


def field_value(value: Any, path: Path) -> Any:
    """Returns the one value at a path without EVERY. Raises ValueError, which says where the path ends."""
    return next(_values(value, path, 0))


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


def _texts(value: Any, path: Path) -> Iterator[str]:
    """Yields the texts at the path, each in one line; null and empty texts are passed over."""
    for found in _values(value, path, 0):
        if found is None:
            continue
        if not isinstance(found, str):
            advice = f": {path_text(path)}[*] takes every text of it" if isinstance(found, list) else ""
            raise ValueError(f"it has {_kind(found)} at {path_text(path)}, not a text{advice}")
        line = " ".join(found.split())
        try:
            line.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the text at {path_text(path)} has half a character (a surrogate)") from None
        yield line


def _field(value: Any, field: str, empty: Collection[str]) -> str:
    """Returns the text of a template's field; empty for null and `empty`. Whole numbers are texts, too."""
    path = field_path(field)
    found = field_value(value, path)
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    text = next(_texts(value, path), "")
    return "" if text in empty else text


def _values(value: Any, path: Path, done: int) -> Iterator[Any]:
    """Yields the values at the path. Raises ValueError, which says where it ends too early."""
    if done == len(path):
        yield value
        return
    step, here = path[done], path_text(path[:done]) or "its top"
    if isinstance(step, str):
        if not isinstance(value, dict):
            raise ValueError(f"it has {_kind(value)} at {here}, not an object with the field {step}")
        if step not in value:
            raise ValueError(_no_field(value, here, step))
        yield from _values(value[step], path, done + 1)
        return
    if not isinstance(value, list):
        raise ValueError(f"it has {_kind(value)} at {here}, not a list")
    if step is EVERY:
        for element in value:
            yield from _values(element, path, done + 1)
    elif step < len(value):
        yield from _values(value[step], path, done + 1)
    else:
        raise ValueError(f"it has a list of {len(value)} at {here}, so there is no [{step}]")


def _no_field(value: Mapping[str, Any], here: str, step: str) -> str:
    short = (name for name in islice(value, 100) if len(name) <= _SHOWN_LETTERS)
    hint = did_you_mean(step, short, most=1)
    names = ", ".join(_short(name) for name in list(value)[:_SHOWN_FIELDS]) or "none"
    more = f" and {len(value) - _SHOWN_FIELDS} more" if len(value) > _SHOWN_FIELDS else ""
    return f"it has no field {step} at {here}{hint} (its fields: {names}{more})"


def _short(name: str) -> str:
    return name if len(name) <= _SHOWN_LETTERS else f"{name[:_SHOWN_LETTERS]}..."


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return _KINDS.get(type(value), type(value).__name__)
