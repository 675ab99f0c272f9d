"""Keys and values that a model config in open_clip's format may have.

A config may be a stranger's, and open_clip hands its keys on as arguments: to its own classes, to timm and to
transformers, which runs code for some of them. Only what stands here reaches them. Imports no torch and no
open_clip.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import Any, TypeGuard

from trainer.errors import InputError
from trainer.sysinfo.own_table import own_table
from trainer.text.near import near

_FEW = 5
_MOST, _WIDEST, _MOST_LAYERS = 2**24, 2**17, 1024
"""Largest number of a config, greatest width and most layers of a tower: beyond all models that there are."""


@dataclass(frozen=True)
class Kind:
    """Values that a key may have; None, which stands for open_clip's default, is one of each kind."""

    words: str
    holds: Callable[[Any], bool]


def _whole(value: Any, least: int = 1, most: int = _MOST) -> TypeGuard[int]:
    return type(value) is int and least <= value <= most


def _all(value: Any, length: int, most: int = _MOST) -> bool:
    return isinstance(value, list) and len(value) == length and all(_whole(each, most=most) for each in value)


def _plain_name(value: Any) -> bool:
    return isinstance(value, str) and ":" not in value


_SIZE = Kind(f"a whole number from 1 to {_MOST:,}", _whole)
_LAYERS = Kind(f"a whole number from 1 to {_MOST_LAYERS:,}", lambda value: _whole(value, most=_MOST_LAYERS))
_KINDS = {
    "size": _SIZE,
    "width": Kind(f"a whole number from 1 to {_WIDEST:,}", lambda value: _whole(value, most=_WIDEST)),
    "id": Kind(f"a whole number from 0 to {_MOST:,}", lambda value: _whole(value, least=0)),
    "sides": Kind(f"{_SIZE.words}, or two of them", lambda value: _whole(value) or _all(value, 2)),
    "layers": _LAYERS,
    "stages": Kind(
        f"{_LAYERS.words}, or four of them",
        lambda value: _LAYERS.holds(value) or _all(value, 4, _MOST_LAYERS),
    ),
    "number": Kind("a number", lambda value: type(value) in (int, float) and isfinite(value)),
    "flag": Kind("true or false", lambda value: isinstance(value, bool)),
    "word": Kind("a word", lambda value: isinstance(value, str)),
    "pool": Kind("a word, true or false", lambda value: isinstance(value, str | bool)),
    "timm": Kind("the name of a model of timm, and of no hub or folder (no colon)", _plain_name),
}
"""Kinds by their names in config_keys.toml."""

Keys = Mapping[str, "Kind | Keys"]

OTHER_PARTS = {
    "audio_cfg": "a model of audio and text (CLAP)",
    "audio_naflex_cfg": "a model of audio and text (GenLAP)",
    "genlap_cfg": "a model of audio and text (GenLAP)",
    "genlip_cfg": "a model that writes captions and compares none (GenLIP)",
}
"""Parts of open_clip's configs whose models are not trained here, with what they are."""


def _keys(table: Mapping[str, Any]) -> Keys:
    return {key: _KINDS[value] if isinstance(value, str) else _keys(value) for key, value in table.items()}


@cache
def config_keys() -> Mapping[str, Keys]:
    """Returns the keys of a whole config, "config", and those of its parts, by the part's name."""
    parts = {name: _keys(part) for name, part in own_table(__file__, "config_keys.toml").items()}
    parts["vision"] = {**parts["blocks"], **parts["vision"], **parts["vision_4"]}
    parts["text"] = {**parts["blocks"], **parts["text"], **parts["text_4"]}
    parts["multimodal"] = {**parts["text"], **parts["multimodal"]}
    towers = {f"{name}_cfg": parts[name] for name in ("vision", "text", "multimodal")}
    return {**parts, "config": {**parts["config"], **towers}}


def check_keys(config: object, place: str) -> None:
    """Raises InputError that lists the keys and values of a config which open_clip must not be given.

    `place` is the config's file or name.
    """
    check_parts(config, place)
    if problems := list(_problems(config, config_keys()["config"], "")):
        raise InputError("\n".join(f"model.name: {place}: {problem}" for problem in problems))


def check_parts(config: object, place: str) -> None:
    """Raises InputError for a model that is none of images and texts; `place` as for `check_keys`."""
    for part, what in OTHER_PARTS.items():
        if isinstance(config, Mapping) and part in config:
            raise InputError(f"model.name: {place} is {what}: Clipship trains models of images and texts")


def _problems(given: object, keys: Keys, name: str) -> Iterator[str]:
    if not isinstance(given, Mapping):
        yield f"{name or 'the config'} is {_short(given)}, and must be a table of keys"
        return
    for key, value in given.items():
        kind, full = keys.get(key), f"{name}.{key}".lstrip(".")
        if kind is None:
            yield f"{full} is no key that a model config may have: remove it{_instead(key, keys)}"
        elif value is None:
            continue
        elif not isinstance(kind, Kind):
            yield from _problems(value, kind, full)
        elif not kind.holds(value):
            yield f"{full} is {_short(value)}, and must be {kind.words}"


def _instead(key: object, keys: Keys) -> str:
    """Returns the allowed keys if they are few, else those that are nearest."""
    few = len(keys) <= _FEW
    names = ", ".join(keys if few else near(str(key), keys))
    if not names:
        return ""
    return f" (allowed are {names})" if few else f" (did you mean {names}?)"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
