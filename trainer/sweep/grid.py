"""The grid of `clipship sweep`: its combinations of values, and a run's name for each. Imports no torch."""

import itertools
import re
from collections.abc import Sequence

from trainer.errors import InputError

MOST = 500
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.+_-]+")


def combinations(grids: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the overrides of each run: every value of a key with every value of the others.

    Each text is KEY=VALUE,VALUE,...; the first key changes slowest. Raises InputError for what is no grid.
    """
    columns: dict[str, list[str]] = {}
    for grid in grids:
        key, equals, values = grid.partition("=")
        key = key.strip()
        if not key or not equals:
            raise InputError(f"--grid {grid}: give KEY=VALUE,VALUE,..., e.g. --grid optim.lr=1e-4,3e-4")
        if key in columns:
            raise InputError(f"--grid {key} is given twice: list all of its values in one --grid")
        if key in ("name", "logging.runs"):
            raise InputError(f"--grid {key}: each run has a folder of its own, named after its values")
        columns[key] = _values(key, values)
    count = 1
    for values_of_key in columns.values():
        count *= len(values_of_key)
    if count > MOST:
        raise InputError(f"the grid has {count:,} runs, more than {MOST}: sweep a part of it")
    return [
        tuple(f"{key}={value}" for key, value in zip(columns, row, strict=True))
        for row in itertools.product(*columns.values())
    ]


def names(job: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a name for the run of each row: the job's, then each key's last part and value.

    Raises InputError if two runs would share a folder.
    """
    found = ["-".join([job, *(_part(override) for override in row)]) for row in rows]
    if len(set(found)) < len(found):
        found = ["-".join([job, *(_NOT_IN_NAMES.sub("-", override) for override in row)]) for row in rows]
    twice = {name for name in found if found.count(name) > 1}
    if twice:
        raise InputError(f"two runs of the grid would be named {min(twice)}: leave equal values out")
    return found


def _part(override: str) -> str:
    key, _, value = override.partition("=")
    return _NOT_IN_NAMES.sub("-", f"{key.rpartition('.')[2]}-{value}").strip("-")


def _values(key: str, text: str) -> list[str]:
    """Returns the values between commas outside of brackets and quotes."""
    values, quote, depth = [""], "", 0
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        else:
            depth += (char in "[{") - (char in "]}")
        if char == "," and not quote and depth == 0:
            values.append("")
        else:
            values[-1] += char
    values = [value.strip() for value in values]
    if quote or depth or not all(values):
        raise InputError(
            f"--grid {key}={text}: a value between two commas is missing, or a bracket or quote is open"
        )
    return values
