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
    """Returns a row for each key but the rank's own number; a rank that lacks a key has "missing"."""
    names = dict.fromkeys(name for environment in environments for name in environment if name != "rank")
    return [_fact(name, environments) for name in names]


def _fact(name: str, environments: Sequence[Mapping[str, str]]) -> Fact:
    ranks_of: dict[str, list[int]] = {}
    for place, environment in enumerate(environments):
        rank = environment.get("rank", "")
        ranks_of.setdefault(environment.get(name, "missing"), []).append(
            int(rank) if rank.isdecimal() else place
        )
    if len(ranks_of) == 1:
        return Fact(name, [(next(iter(ranks_of)), "")], differs=False)
    values = [(value, ranks(those)) for value, those in list(ranks_of.items())[:_VALUES]]
    if len(ranks_of) > _VALUES:
        values.append((f"and {len(ranks_of) - _VALUES} more", ""))
    return Fact(name, values, differs=name not in _OWN)
