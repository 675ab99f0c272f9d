"""Paths that are typed with `--set`: they start at the current folder, those of a job file at its folder.

They are made absolute before anything else reads them: ranks, a later start and a clone have another folder.
Imports no torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from trainer.config.job import Job
from trainer.config.keys import path_of, resolved
from trainer.config.overrides import Override, parse_overrides, toml_text
from trainer.config.toml_lines import Key
from trainer.config.types import Section


def from_here(overrides: Sequence[str]) -> tuple[str, ...]:
    """Returns the `key=value` texts with relative paths joined to the current folder. Idempotent.

    Raises InputError for a text of another form, and as `resolved` does.
    """
    changes = parse_overrides(overrides)
    return tuple(_absolute(text, change) for text, change in zip(overrides, changes, strict=True))


def _absolute(text: str, change: Override) -> str:
    typed = change.text if change.is_bare() else change.value
    absolute = _resolved(typed, change.key)
    if absolute == typed:
        return text
    return f"{text.partition('=')[0]}={toml_text(absolute)}"


def _resolved(value: Any, key: Key) -> Any:
    """Returns the value of a key, or of a section's keys, with absolute paths."""
    if isinstance(value, dict):
        return {name: _resolved(inner, (*key, name)) for name, inner in value.items()}
    field = _field(key)
    mark = path_of(field) if field is not None else None
    if (
        mark is None or not value or (isinstance(value, list) and "" in value)
    ):  # empty texts are refused later
        return value
    absolute = resolved(tuple(value) if isinstance(value, list) else value, mark, Path.cwd(), key)
    return list(absolute) if isinstance(absolute, tuple) else absolute


def _field(key: Key) -> FieldInfo | None:
    """Returns the declaration of a key of the job file; None if there is none."""
    section: Any = Job
    for name in key[:-1]:
        field = section.model_fields.get(name)
        section = field.annotation if field is not None else None
        if not (isinstance(section, type) and issubclass(section, Section)):
            return None
    found: FieldInfo | None = section.model_fields.get(key[-1])
    return found
