"""`data.caption_template`: a caption made of several fields, such as "{title}. {caption}".

A field is a path into a sample's JSON, as after the colon of `data.caption_key`, or a column of a table.
Braces that belong to the text are doubled: {{ and }}. Pure; opens no file.
"""

from collections.abc import Callable, Iterable
from functools import cache
from string import Formatter
from typing import NamedTuple

from trainer.config.caption_key import EVERY, Path, parse_path


class TemplatePart(NamedTuple):
    """Text of a template and the field behind it."""

    text: str
    field: str | None
    """Name as the template has it; None behind the last text."""


Template = tuple[TemplatePart, ...]


@cache
def parse_template(template: str) -> Template:
    """Returns the template's parts. Raises ValueError if it is malformed or has no field."""
    try:
        parts = [
            TemplatePart(text, field) for text, field, *rest in Formatter().parse(template) if _plain(*rest)
        ]
    except ValueError as error:
        raise ValueError(f"{template!r} cannot be read ({error}): {_FORM}") from None
    fields = [part.field for part in parts if part.field is not None]
    if not fields or not all(field and field == field.strip() for field in fields):
        raise ValueError(f"{template!r} has no field, or one without a name: {_FORM}")
    return tuple(parts)


_FORM = 'write each field in braces, such as "{title}. {caption}", and braces of the text twice: {{ and }}'


def _plain(specification: str | None, conversion: str | None) -> bool:
    if specification or conversion:
        raise ValueError("a field has a name alone")
    return True


@cache
def field_path(field: str) -> Path:
    """Returns the path of a field in JSON. Raises ValueError if it is malformed, or names several values."""
    path = parse_path(f"caption_template: {{{field}}}", field)
    if EVERY in path:
        raise ValueError(
            f"caption_template: {{{field}}} would be several texts in one caption: name one, such as [0]"
        )
    return path


def check_fields(templates: Iterable[str]) -> None:
    """Raises ValueError if a field of the templates is no path into JSON."""
    for template in templates:
        for part in parse_template(template):
            if part.field is not None:
                field_path(part.field)


def filled(template: Template, text_of: Callable[[str], str]) -> str:
    """Returns the caption in one line, with `text_of` each field; empty if a field is empty."""
    texts = [text_of(part.field) if part.field is not None else "" for part in template]
    if not all(text for part, text in zip(template, texts, strict=True) if part.field is not None):
        return ""
    return " ".join("".join(part.text + text for part, text in zip(template, texts, strict=True)).split())
