"""Puts into words what the JSON Schema says of a key of the job file.

The reference and `clipship explain` show them. No pydantic, no torch.
"""

from typing import Any

from trainer.config.tables import toml_text

PATHS = {
    "file": "path of a file",
    "folder": "path of a folder",
    "patterns": "paths: braces and globs are expanded, URLs and streams are taken too",
}
"""Words for a schema's `x-path`."""


def kind(place: dict[str, Any]) -> str:
    """Returns type and range in words: "whole number, at least 1"."""
    if "anyOf" in place:
        first, *others = place["anyOf"]
        return kind(first) + "".join(_or(other, first) for other in others)
    if "enum" in place or "const" in place:
        return "one of " + ", ".join(f'`"{choice}"`' for choice in place.get("enum", [place.get("const")]))
    type_name = place.get("type")
    if type_name == "array":
        items = place.get("items", {})
        if not isinstance(items, list):
            return f"list; each entry: {kind(items)}"
        same = all(item == items[0] for item in items)
        each = f"each: {kind(items[0])}" if same else "; ".join(map(kind, items))
        return f"list of {len(items)}; {each}"
    if type_name == "object":
        values: Any = place.get("additionalProperties") or next(
            iter(place.get("patternProperties", {}).values()), {}
        )
        return f"table; each value: {kind(values)}" if isinstance(values, dict) and values else "table"
    names = {"boolean": "`true` or `false`", "integer": "whole number", "number": "number", "string": "text"}
    return names.get(str(type_name), "any value") + _range(place)


def _or(other: dict[str, Any], first: dict[str, Any]) -> str:
    """Returns the words for another type that a key may have beside the first one."""
    items = other.get("items")
    mark = ";" if ", " in kind(first) else ""
    if items == first:
        return f"{mark} or a list of them"
    if isinstance(items, list) and all(item == first for item in items):
        return f"{mark} or a list of {len(items)} of them"
    return f"{mark} or {kind(other)}"


def default(value: object) -> str:
    """Returns a default as the job file writes it; None is "not set"."""
    if value is None:
        return "not set"
    return f"`{toml_text(value)}`" if value != {} else "empty"


def resumed(place: dict[str, Any]) -> str:
    """Returns whether a run that goes on may change the key."""
    return "a resumed run may change it" if place["x-resumed-run-may-change"] else "fixed for the whole run"


def _range(place: dict[str, Any]) -> str:
    phrases = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    return "".join(
        f", {phrase} {place[name]:,}".removesuffix(".0") for name, phrase in phrases.items() if name in place
    )
