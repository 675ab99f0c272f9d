"""Quotes what is pasted elsewhere: commands for bash, zsh and fish alike, and paths in patterns of data."""

import os
import re

_PLAIN = re.compile(r"[A-Za-z0-9_@+:,./-][A-Za-z0-9_@+=:,./-]*", re.ASCII)
"""Words that no shell changes."""
_APART = re.compile(r"(['\\]+)")


def word(text: object) -> str:
    """Returns the text as one word of a shell's command.

    A backslash stands outside of quotes: between single quotes it is an escape to fish, and none to bash.
    """
    text = str(text)
    if _PLAIN.fullmatch(text):
        return text
    parts = _APART.split(text)
    return "".join(
        _outside(part) if place % 2 else f"'{part}'" for place, part in enumerate(parts) if part
    ) or ("''")


def command(*words: object) -> str:
    """Returns the words as a shell's command."""
    return " ".join(map(word, words))


def as_pattern(path: object) -> str:
    """Returns the pattern, as `data.train` takes it, that names this path alone: a folder may be `run[1]`."""
    return "".join(f"[{c}]" if c in "*?[" else f"\\{c}" if c in "\\{}," else c for c in str(path))


def with_home(pattern: str) -> str:
    """Returns the pattern with the home folder, which may have brackets in its name, in place of `~/`."""
    home = os.path.expanduser("~").rstrip("/")
    return as_pattern(home) + pattern[1:] if pattern.startswith("~/") else pattern


def _outside(part: str) -> str:
    """Returns single quotes and backslashes, each after a backslash."""
    return "".join(f"\\{char}" for char in part)
