"""Writes values as YAML text that every reader of YAML 1.1 and 1.2 reads back unchanged. Pure."""

import math
import re
from collections.abc import Mapping, Sequence

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_NO_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
"""Words that YAML 1.1 does not read as text, in any case."""


def yaml(value: object) -> str:
    """Returns one line of YAML, with lists and mappings in brackets.

    Texts are in double quotes, so that 12:30:00, 0123 and `no` stay texts. Raises TypeError for other values.
    """
    if isinstance(value, str):
        return '"' + "".join(_escaped(character) for character in value) + '"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        text = repr(value)  # without a point YAML 1.1 reads 1e-05 as a text
        return text if "." in text else text.replace("e", ".0e")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{yaml_key(key)}: {yaml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(yaml(inner) for inner in value) + "]"
    raise TypeError(f"{value!r} has no place in YAML")


def yaml_block(text: str, indent: int) -> str:
    """Returns a text of several lines as a readable block if YAML allows it, else in quotes."""
    lines = text.removesuffix("\n").split("\n")
    readable = (
        text.endswith("\n")
        and lines[0][:1] not in ("", " ")
        and lines[-1].strip()
        and all(map(_as_it_is, lines))
    )
    return "|\n" + "\n".join((" " * indent + line).rstrip() for line in lines) if readable else yaml(text)


def _as_it_is(line: str) -> bool:
    return line == line.rstrip() and all(
        _escaped(character) == character or character in '"\\' for character in line
    )


def yaml_key(key: object) -> str:
    """Returns a mapping's key, without quotes if no reader takes it for anything but a text."""
    text = str(key)
    return text if _PLAIN_KEY.fullmatch(text) and text.lower() not in _NO_TEXT else yaml(text)


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    code = ord(character)
    if 0xD800 <= code < 0xE000:
        raise ValueError(f"U+{code:04X} is half a character: no text file can hold it")
    if character.isprintable() and code != 0xFEFF:
        return character
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
