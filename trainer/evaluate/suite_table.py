"""Table of the public data sets and suites that `clipship eval --suite` knows: `suites.toml`, read once.

Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from trainer.errors import InputError
from trainer.sysinfo.own_table import own_table
from trainer.text.terminal import one_line

OWN = "own"
"""Name of the suite that the folders of `eval.suite.folders` are."""
_LONGEST_SHOWN = 60


@dataclass(frozen=True)
class Metric:
    """A metric of a data set."""

    title: str
    retrieval: bool = False
    """True if it is measured by retrieval, False if by classification."""


METRICS: Mapping[str, Metric] = {
    "top1": Metric("top-1 accuracy"),
    "mean_per_class_recall": Metric("mean per-class recall"),
    "macro_f1": Metric("macro F1"),
    "mean_r1": Metric("mean R@1", retrieval=True),
    "query_r1": Metric("text to image R@1", retrieval=True),
}
"""Metrics that a set may be reported by. macro_f1 and mean_per_class_recall are means over the classes that
have samples; mean_r1 is the mean of both directions; query_r1 is a share of different texts, each found if
one of its pictures is nearest."""


@dataclass(frozen=True)
class SetRow:
    """One public data set."""

    name: str
    title: str
    metric: str
    source: str
    """Place where the files come from: an address, or words."""

    @property
    def folder(self) -> str:
        """Name of its folder below `eval.suite.root`; `_test` may follow."""
        return f"wds_{self.name.replace('/', '-')}"


@dataclass(frozen=True)
class SuiteTable:
    """All data sets and suites."""

    sets: Mapping[str, SetRow]
    suites: Mapping[str, Sequence[str]]
    """Names of each suite's sets."""
    unsupported: Mapping[str, Mapping[str, str]]
    """By suite: the sets that are not measured, each with the reason."""


@cache
def table() -> SuiteTable:
    """Returns the table of the package."""
    content = own_table(__file__, "suites.toml")
    sets = {name: SetRow(name, **row) for name, row in content["sets"].items()}
    return SuiteTable(sets, content["suites"], content["unsupported"])


def rows_of(names: Sequence[str]) -> list[SetRow]:
    """Returns the sets that suites and sets by these names have, each once.

    The suite of own folders has none here. Raises InputError for unknown names, with the nearest known one.
    """
    if unknown := [name for name in names if name not in known_names()]:
        raise InputError("\n".join(map(_unknown, unknown)))
    chosen = dict.fromkeys(each for name in names for each in table().suites.get(name, (name,)))
    return [table().sets[name] for name in chosen if name != OWN]


def unsupported(names: Sequence[str]) -> Mapping[str, str]:
    """Returns the sets of these suites that are not measured, with the reasons."""
    return {each: why for name in names for each, why in table().unsupported.get(name, {}).items()}


def known_names() -> tuple[str, ...]:
    """Returns the names of all suites, then those of all sets."""
    return (*table().suites, OWN, *table().sets)


def _unknown(name: str) -> str:
    near = get_close_matches(name[:_LONGEST_SHOWN], known_names(), n=1)
    suites = ", ".join((*table().suites, OWN))
    hint = f"did you mean {near[0]}?" if near else f"the suites are {suites}"
    reasons = {each: why for some in table().unsupported.values() for each, why in some.items()}
    if name in reasons:
        hint = f"it is not measured, because {reasons[name]}"
    shown = one_line(name[:_LONGEST_SHOWN])
    return f'eval.suite.names: there is no suite and no data set called "{shown}"; {hint}'
