"""Shows the environment of all ranks as one table, however many they are, and marks what differs.

Pure; no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.report.wording import ranks

_OWN = {"node", "device"}
"""Keys that each rank may have with a value of its own."""
_VALUES = 12


@dataclass(frozen=True)
class Fact:
    """One row of the table."""

    name: str
    values: Sequence[tuple[str, str]]
    """Value and the ranks that have it; no ranks are named if all have it."""
    differs: bool
    """True if ranks differ that should be equal."""


def environment_table(environments: Sequence[Mapping[str, str]]) -> list[Fact]:
    """Returns a row for each key but the rank's own number; a rank that lacks a key has "not there"."""
    names = dict.fromkeys(name for environment in environments for name in environment if name != "rank")
    return [_fact(name, environments) for name in names]


def _fact(name: str, environments: Sequence[Mapping[str, str]]) -> Fact:
    found: dict[str, list[int]] = {}
    for place, environment in enumerate(environments):
        rank = environment.get("rank", "")
        found.setdefault(environment.get(name, "not there"), []).append(
            int(rank) if rank.isdecimal() else place
        )
    if len(found) == 1:
        return Fact(name, [(next(iter(found)), "")], differs=False)
    values = [(value, ranks(those)) for value, those in list(found.items())[:_VALUES]]
    if len(found) > _VALUES:
        values.append((f"and {len(found) - _VALUES} more", ""))
    return Fact(name, values, differs=name not in _OWN)
