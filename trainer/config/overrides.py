"""`--set optim.lr=1e-3`: changes one value of a job file from the command line.

Pure; imports neither the model nor torch.
"""

import datetime
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.toml_lines import Key
from trainer.errors import InputError

_EXAMPLES = """optim.lr=1e-3, data.train=shards/*.tar or 'kubernetes.mounts."/data"=pvc:data'"""


@dataclass(frozen=True)
class Override:
    """A key and its new value; None removes the key, so that its default applies."""

    key: Key
    value: object
    text: str = ""
    """The value as it was typed."""

    def is_bare(self) -> bool:
        """Returns whether the value was read as a number or a boolean, without quotes.

        If the key takes text, the typed characters are meant instead.
        """
        return isinstance(self.value, int | float)


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """Parse overrides of the form `section.key=value`.

    A value is read as TOML, else taken as text. Raises InputError that lists all texts of another form.
    """
    parts = [text.partition("=") for text in texts]
    keys = [_parsed_key(key.strip()) if equals else None for key, equals, _ in parts]
    wrong = [text for text, key in zip(texts, keys, strict=True) if key is None]
    if wrong:
        raise InputError(
            "\n".join(f"--set {text!r}: expected key=value, for example {_EXAMPLES}" for text in wrong)
        )
    return [
        Override(key, _value(value), value.strip())
        for key, (_, _, value) in zip(keys, parts, strict=True)
        if key
    ]


def apply_overrides(table: dict[str, Any], overrides: Sequence[Override]) -> None:
    """Change the table in place, later overrides last; missing sections are made.

    Raises InputError if an override treats a value as a section.
    """
    for override in overrides:
        section: Any = table
        for depth, name in enumerate(override.key[:-1], start=1):
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                shown = ".".join(override.key)
                raise InputError(
                    f"--set {shown}: {'.'.join(override.key[:depth])} is a value and has no keys"
                )
        if override.value is None:
            section.pop(override.key[-1], None)
        else:
            section[override.key[-1]] = override.value


def _parsed_key(text: str) -> Key | None:
    """Returns the key, written as in the file; None if the text is no key."""
    try:
        table: Any = tomllib.loads(f"{text} = 0")
    except (ValueError, RecursionError):
        return None
    key: list[str] = []
    while isinstance(table, dict) and len(table) == 1:
        name, table = next(iter(table.items()))
        key.append(name)
    return tuple(key) if table == 0 else None


def _value(text: str) -> object:
    if not text.strip():
        return None
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # A bare 12:30:00 is a time of day to TOML; a text with line breaks is no single value.
    is_text = read.keys() != {"value"} or isinstance(read["value"], datetime.date | datetime.time)
    return text if is_text else read["value"]
