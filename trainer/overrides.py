"""`--set optim.lr=1e-3`: one value of a job file changed from the command line. Pure; imports no model and no torch."""

import datetime
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import InputError
from trainer.toml_lines import Key

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True)
class Override:
    """A key and its new value; None removes the key, so that its default counts."""

    key: Key
    value: object


def parse_overrides(texts: Sequence[str]) -> list[Override]:
    """`section.key=value` each: the value is read as TOML, else taken as text. Raises InputError naming all that have another form."""
    wrong = [text for text in texts if not _KEY.fullmatch(text.partition("=")[0].strip()) or "=" not in text]
    if wrong:
        problems = (f"--set {text!r}: expected key=value, for example optim.lr=1e-3 or data.train=shards/*.tar" for text in wrong)
        raise InputError("\n".join(problems))
    parts = (text.partition("=") for text in texts)
    return [Override(tuple(key.strip().split(".")), _value(value)) for key, _, value in parts]


def apply_overrides(table: dict[str, Any], overrides: Sequence[Override]) -> None:
    """Change the table in place, later overrides last; sections that are missing are made."""
    for override in overrides:
        section: Any = table
        for depth, name in enumerate(override.key[:-1], start=1):
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                shown = ".".join(override.key)
                raise InputError(f"--set {shown}: {'.'.join(override.key[:depth])} is a value, it has no keys of its own")
        if override.value is None:
            section.pop(override.key[-1], None)
        else:
            section[override.key[-1]] = override.value


def _value(text: str) -> object:
    if not text.strip():
        return None
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # A bare 12:30:00 is a time of day to TOML; a text that brings lines of its own is no single value.
    is_text = read.keys() != {"value"} or isinstance(read["value"], datetime.date | datetime.time)
    return text if is_text else read["value"]
