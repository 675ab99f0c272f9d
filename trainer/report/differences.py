"""Finds what differs between runs: job, environment, data and results. Pure; imports no torch."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainer.config.tables import flat, toml_text
from trainer.report.cost import taken_s, usual_records
from trainer.report.folder import Numbers, RunFacts
from trainer.report.wording import is_share, metric_names, metric_text, number
from trainer.text.wording import duration

NONE = "-"
"""Text for a value that a run does not have."""
_OF_THE_RUN = {"name", "logging.runs"}
"""Keys of the job by which each run differs from each other one."""
_OF_A_RANK = {"rank", "generation", "executable", "nccl_library"}
"""Facts of a rank's environment that say nothing about results."""
_DATA = "data."
_SHOWN_VALUES = 3


@dataclass(frozen=True)
class Difference:
    """A fact in which runs differ, with a text for each of them."""

    topic: str
    """job, environment, data or results."""
    name: str
    values: tuple[str, ...]


def differences(runs: Sequence[RunFacts]) -> list[Difference]:
    """Returns the facts in which the runs differ, by topic, in the order of the first run that has them."""
    jobs = [_flat(facts.job) for facts in runs]
    data = [{key: value for key, value in job.items() if key.startswith(_DATA)} for job in jobs]
    rest = [
        {key: value for key, value in job.items() if key not in _OF_THE_RUN and not key.startswith(_DATA)}
        for job in jobs
    ]
    return [
        *_unequal("job", rest),
        *_unequal("data", data),
        *_unequal("environment", [_environment(facts.environment) for facts in runs]),
        *_unequal("results", [_results(facts) for facts in runs]),
    ]


def _unequal(topic: str, sides: Sequence[Mapping[str, str]]) -> Iterator[Difference]:
    for name in dict.fromkeys(name for side in sides for name in side):
        values = tuple(side.get(name, NONE) for side in sides)
        if len(set(values)) > 1:
            yield Difference(topic, name, values)


def _flat(table: Mapping[str, Any]) -> dict[str, str]:
    """Returns the keys of a job with their sections' names, and values as TOML has them."""
    return {key: toml_text(value) for key, value in flat(table)}


def _environment(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Returns the number of ranks, and for each fact the values that ranks have."""
    if not ranks:
        return {}
    facts = {"ranks": str(len(ranks))}
    for name in dict.fromkeys(name for rank in ranks for name in rank if name not in _OF_A_RANK):
        values = list(dict.fromkeys(rank[name] for rank in ranks if name in rank))
        more = f" and {len(values) - _SHOWN_VALUES} more" if len(values) > _SHOWN_VALUES else ""
        facts[name] = ", ".join(values[:_SHOWN_VALUES]) + more
    return facts


def _results(facts: RunFacts) -> dict[str, str]:
    """Returns the last and the best values of loss and metrics, the speed, and the time."""
    found: dict[str, str] = {}
    records, evaluations = facts.metrics.records, facts.metrics.evaluations
    if records:
        found["steps"] = number(records[-1]["step"])
        found["loss"] = number(records[-1].get("loss", math.nan))
        found["lowest loss"] = _best(min, "loss", records, number)
        speeds = [event.get("samples_per_s", math.nan) for event in usual_records(facts)]
        if finite := [speed for speed in speeds if math.isfinite(speed)]:
            found["samples per second"] = number(round(statistics.median(finite), 1))
    for name in metric_names(evaluations):
        text = partial(metric_text, name, evaluations=evaluations)
        found[name] = next(text(event[name]) for event in reversed(evaluations) if name in event)
        if is_share(name, evaluations):
            found[f"best {name}"] = _best(max, name, evaluations, text)
    if (seconds := taken_s(facts)) is not None:
        found["time"] = duration(seconds)
    return found


def _best(
    best: Callable[[list[tuple[float, float]]], tuple[float, float]],
    name: str,
    events: Sequence[Numbers],
    text: Callable[[float], str],
) -> str:
    measured = [(event[name], event["step"]) for event in events if math.isfinite(event.get(name, math.nan))]
    if not measured:
        return NONE
    value, step = best(measured)
    return f"{text(value)} at step {number(step)}"
