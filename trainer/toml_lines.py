"""Where each key of a TOML text stands: tomllib tells no lines. For text that tomllib has accepted; imports no model and no torch."""

import re
import tomllib
from collections.abc import Iterator, Mapping

Key = tuple[str, ...]

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'  # multi-line strings may end in up to two quotes of their own
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[A-Za-z0-9_-]+"
    r"|[^\S\n]+"
    r"|.",
    re.DOTALL,
)
_OPENING = "[{"
_CLOSING = "]}"


def key_lines(text: str) -> dict[Key, int]:
    """Line (from 1) of every section header and key; keys inside a one-line table are not listed, their table is."""
    lines: dict[Key, int] = {}
    section: Key = ()
    for line, tokens in _statements(text):
        if tokens[0] == "[":
            section = _key(tokens)
            lines.setdefault(section, line)
        else:
            lines[section + _key(tokens[: tokens.index("=")])] = line
    return lines


def line_of(lines: Mapping[Key, int], key: Key) -> int | None:
    """The line of the key, else of the first key in it (a section that has no header), else of the nearest section around it."""
    inside = [line for other, line in lines.items() if other[: len(key)] == key] if key else []
    return inside[0] if inside else next((lines[key[:end]] for end in range(len(key), 0, -1) if key[:end] in lines), None)


def _statements(text: str) -> Iterator[tuple[int, list[str]]]:
    """Headers and assignments with the line they begin on; a value may go over several lines."""
    line, depth, begin = 1, 0, 1
    tokens: list[str] = []
    for token in _TOKEN.findall(text + "\n"):
        if token == "\n" and depth == 0:
            if tokens:
                yield begin, tokens
            tokens = []
        elif not token.isspace() and not token.startswith("#"):
            begin = begin if tokens else line
            tokens.append(token)
            depth += (token in _OPENING) - (token in _CLOSING)
        line += token.count("\n")


def _key(tokens: list[str]) -> Key:
    return tuple(_unquoted(token) for token in tokens if token not in ("[", "]", "."))


def _unquoted(token: str) -> str:
    return str(tomllib.loads(f"key = {token}")["key"]) if token[0] in "\"'" else token
