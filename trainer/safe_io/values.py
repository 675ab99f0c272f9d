"""Files of lines `NAME=value`, which Python writes and a shell reads without a parser of JSON."""

from collections.abc import Mapping
from pathlib import Path

from trainer.safe_io.plain import read_plain


def value_lines(values: Mapping[str, object]) -> str:
    """Returns the lines: one for each item of a list or tuple, none for None, `yes` or `no` for a bool.

    A value stays on its line: line breaks and control characters become spaces.
    """
    return "".join(
        f"{name}={_on_a_line(item)}\n"
        for name, value in values.items()
        if value is not None
        for item in (value if isinstance(value, list | tuple) else [value])
    )


def _on_a_line(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "".join(letter if letter.isprintable() else " " for letter in str(value))


def read_values(path: Path) -> dict[str, str]:
    """Returns the last value of each name; none if there is no such file, or if it cannot be read."""
    try:
        return last_values(read_plain(path))
    except (OSError, ValueError):
        return {}


def last_values(text: str) -> dict[str, str]:
    """Returns the last value of each name in such lines; what is no such line is passed over."""
    parts = (line.partition("=") for line in text.split("\n"))
    return {name: value for name, is_value, value in parts if is_value}
