"""Table of the public data sets and suites that `clipship eval --suite` knows: `suites.toml`, read once.

Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from trainer.errors import InputError
from trainer.sysinfo.own_table import own_table
from trainer.text.near import near
from trainer.text.terminal import one_line

OWN = "own"
"""Name of the suite that the folders of `eval.suite.folders` are."""
_LONGEST_SHOWN = 60


@dataclass(frozen=True)
class Metric:
    """A metric of a data set."""

    title: str
    task: str = "classification"
    """Name of how it is measured, for records: a key of `trainer.evaluate.suite._MEASURES`."""

    @property
    def captioned(self) -> bool:
        """True if samples have captions and no classes."""
        return self.task in ("retrieval", "choice")

    @property
    def probe(self) -> bool:
        """True if a labelled training set is learned from."""
        return self.task in ("knn", "linear")


METRICS: Mapping[str, Metric] = {
    "top1": Metric("top-1 accuracy"),
    "mean_per_class_recall": Metric("mean per-class recall"),
    "macro_f1": Metric("macro F1"),
    "mean_r1": Metric("mean R@1", "retrieval"),
    "query_r1": Metric("text to image R@1", "retrieval"),
    "choice_top1": Metric("right caption chosen", "choice"),
    "knn_top1": Metric("kNN top-1 accuracy", "knn"),
    "linear_top1": Metric("linear probe accuracy", "linear"),
}
"""Metrics that a set may be reported by. macro_f1 and mean_per_class_recall are means over the classes that
have samples; mean_r1 is the mean of both directions; query_r1 is a share of different texts, each found if
one of its pictures is nearest."""
PROBES: Mapping[str, str] = {metric.task: name for name, metric in METRICS.items() if metric.probe}
"""Metrics of probes by what stands before the colon of a name: "knn:vtab/pets", "linear:own"."""


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
        return f"wds_{split_name(self.name)[1].replace('/', '-')}"


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


def split_name(name: str) -> tuple[str, str]:
    """Returns the probe that a name of a suite or a set asks for, "" for none, and the name without it."""
    probe, colon, rest = name.partition(":")
    return (probe, rest) if colon and probe in PROBES else ("", name)


def rows_of(names: Sequence[str]) -> list[SetRow]:
    """Returns the sets that suites and sets by these names have, each once.

    The suite of own folders has none here, and a probe leaves out a suite's sets for retrieval. Raises
    InputError for unknown names, with the nearest known one.
    """
    if unknown := [name for name in names if split_name(name)[1] not in known_names()]:
        raise InputError("\n".join(map(_unknown, unknown)))
    chosen: dict[SetRow, None] = {}
    for probe, base in map(split_name, names):
        rows = [table().sets[each] for each in table().suites.get(base, (base,)) if each != OWN]
        usable = [row for row in rows if not (probe and METRICS[row.metric].captioned)]
        if rows and not usable:
            raise InputError(f'eval.suite.names: "{probe}:{base}": its samples have captions and no classes')
        chosen |= dict.fromkeys(_by(probe, row) for row in usable)
    return list(chosen)


def _by(probe: str, row: SetRow) -> SetRow:
    return replace(row, name=f"{probe}:{row.name}", metric=PROBES[probe]) if probe else row


def unsupported(names: Sequence[str]) -> Mapping[str, str]:
    """Returns the sets of these suites that are not measured, with the reasons."""
    bases = (split_name(name)[1] for name in names)
    return {each: why for name in bases for each, why in table().unsupported.get(name, {}).items()}


def known_names() -> tuple[str, ...]:
    """Returns the names of all suites, then those of all sets."""
    return (*table().suites, OWN, *table().sets)


def _unknown(name: str) -> str:
    nearest = near(name[:_LONGEST_SHOWN], known_names(), most=1)
    suites = ", ".join((*table().suites, OWN))
    hint = f"did you mean {nearest[0]}?" if nearest else f"the suites are {suites}"
    reasons = {each: why for some in table().unsupported.values() for each, why in some.items()}
    if name in reasons:
        hint = f"it is not measured, because {reasons[name]}"
    shown = one_line(name[:_LONGEST_SHOWN])
    return f'eval.suite.names: there is no suite and no data set called "{shown}"; {hint}'
