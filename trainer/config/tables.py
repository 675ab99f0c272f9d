"""Tables of a job file, before and beside the typed model. Pure; imports nothing of the package."""

from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Returns both tables together; a value of `other` takes the place of that of `one`."""
    both = dict(one)
    for key, value in other.items():
        nested = isinstance(value, Mapping) and isinstance(one.get(key), Mapping)
        both[key] = merged(one[key], value) if nested else value
    return both


def flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each key with the names of its sections, such as optim.lr, and its value."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def toml_text(value: Any) -> str:
    """Returns the value as TOML in one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml_text(name)} = {toml_text(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def with_tuples(value: object) -> object:
    """Returns the value with lists made tuples, which strict models want; TOML and JSON have lists."""
    if isinstance(value, dict):
        return {key: with_tuples(inner) for key, inner in value.items()}
    return tuple(with_tuples(inner) for inner in value) if isinstance(value, list) else value
