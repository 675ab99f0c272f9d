"""Reads the tables that are files of the package. Imports no torch."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


@cache
def own_table(module: str, name: str) -> dict[str, Any]:
    """Returns the content of a TOML file beside a module, whose `__file__` is given; it is read once."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


def completed(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the rows, each with what it lacks from the earlier one that it is `like`."""
    found: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        found[name] = {**found.get(row.get("like", ""), {}), **row}
        found[name].pop("like", None)
    return found
