"""Makes the report's bars of what `clipship eval --suite` left in a run folder. Pure; no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.report.wording import number, percent


@dataclass(frozen=True)
class SetBar:
    """One data set of a suite: a row with a bar."""

    name: str
    title: str
    metric: str
    share: float
    """Value from 0 to 1, which is the length of the bar."""
    text: str
    samples: str
    metrics: str
    """All metrics in one line."""


@dataclass(frozen=True)
class SuiteBars:
    """Results of one suite by the newest checkpoint that was measured."""

    names: str
    step: int
    ema: bool
    sets: Sequence[SetBar]
    mean: str
    unmeasured: Sequence[tuple[str, str]]
    """Sets without a result, each with the reason."""


def suite_bars(files: Iterable[Mapping[str, Any]]) -> list[SuiteBars]:
    """Returns the suites in the files, each of its newest step; what cannot be read is left out."""
    suites = [suite for file in files if (suite := _suite(file)) is not None]
    newest = {(suite.names, suite.ema): suite for suite in sorted(suites, key=lambda suite: suite.step)}
    return [newest[key] for key in sorted(newest)]


def _suite(file: Mapping[str, Any]) -> SuiteBars | None:
    step, names = file.get("step"), listed(file, "names")
    sets = [bar for each in listed(file, "sets") if (bar := _bar(each)) is not None]
    if type(step) is not int or not 0 <= step < 10**15 or not sets:
        return None
    mean = sum(bar.share for bar in sets) / len(sets)
    return SuiteBars(
        names=", ".join(str(name) for name in names),
        step=step,
        ema=file.get("ema") is True,
        sets=sets,
        mean=percent(mean),
        unmeasured=[*_reasons(listed(file, "sets"), "error"), *_reasons(listed(file, "missing"), "why")],
    )


def _bar(each: Any) -> SetBar | None:
    if not isinstance(each, dict) or not _is_share(each.get("value")):
        return None
    metrics, samples = each.get("metrics"), each.get("samples")
    shares = metrics if isinstance(metrics, dict) else {}
    return SetBar(
        name=str(each.get("name", "")),
        title=str(each.get("title", "")),
        metric=str(each.get("metric_title", each.get("metric", ""))),
        share=each["value"],
        text=percent(each["value"]),
        samples=number(samples) if type(samples) is int and abs(samples) < 10**15 else "",
        metrics=", ".join(f"{name} {percent(share)}" for name, share in shares.items() if _is_share(share)),
    )


def _reasons(entries: Sequence[Any], key: str) -> list[tuple[str, str]]:
    return [
        (str(each.get("name", "")), str(each[key]))
        for each in entries
        if isinstance(each, dict) and key in each
    ]


def listed(table: Mapping[str, Any], key: str) -> list[Any]:
    """Returns the list of a key in a table from a file; an empty one if there is none."""
    value = table.get(key)
    return value if isinstance(value, list) else []


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1
