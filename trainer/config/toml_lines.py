"""Finds the line of each key in a TOML text, which tomllib does not report.

Works on text that tomllib has accepted; imports no model and no torch.
"""

import re
import tomllib
from collections.abc import Iterator

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
_KEY_BEGIN = re.compile(r"[,{#]")
_OPENING = "[{"
_CLOSING = "]}"


def key_lines(text: str) -> dict[Key, int]:
    """Returns the line (from 1) of every section header and key.

    For a one-line table only the table itself is listed, not the keys inside.
    """
    lines: dict[Key, int] = {}
    section: Key = ()
    for line, tokens in _statements(text):
        if tokens[0] == "[":
            section = _key(tokens)
            lines.setdefault(section, line)
        else:
            lines[section + _key(tokens[: tokens.index("=")])] = line
    return lines


class Lines:
    """Lines of the keys of one TOML text, parsed once for any number of look-ups."""

    def __init__(self, text: str) -> None:
        self._own = key_lines(text)
        self._first: dict[Key, int] = {}
        for key, line in self._own.items():
            for end in range(1, len(key) + 1):
                self._first.setdefault(key[:end], line)

    def of(self, key: Key) -> int | None:
        """Returns the line of the key, or the nearest line to it; None if there is none.

        The nearest is the first key in it (for a section that has no header), else the closest section around
        it.
        """
        if key in self._first:
            return self._first[key]
        return next(
            (self._own[key[:end]] for end in range(len(key) - 1, 0, -1) if key[:end] in self._own), None
        )


def line_of_a_long_key(text: str, most: int) -> int | None:
    """Returns the line of the first key with more parts than `most`, None if there is none.

    The text need not be parsed yet. Inside a multi-line text, a line with as many dots before an equals sign
    counts too.
    """
    for number, line in enumerate(text.split("\n") if text.count(".") > most else (), start=1):
        before = [line] if line.lstrip().startswith("[") else line.split("=")[:-1]
        if any(_KEY_BEGIN.split(part)[-1].count(".") >= most for part in before):
            return number
    return None


def _statements(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yields headers and assignments as tokens, each with its first line; a value may span several lines."""
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
