"""Makes one HTML page that lays the curves of several runs over each other. No torch.

It follows the rules of `trainer.report.page`: it loads nothing, and escapes everything from a run folder.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from trainer.errors import InputError
from trainer.report.charts import Chart, Series, line_chart
from trainer.report.differences import Difference, differences
from trainer.report.figures import LINES, metric_axis, series
from trainer.report.folder import Numbers, RunFacts, read_run
from trainer.report.headline import Status, status, tiles
from trainer.report.page import render, write_page
from trainer.report.wording import metric_names, metric_title
from trainer.text.wording import many

COMPARISON_FILE = "comparison.html"
"""Name of the page, in the folder that holds the first run."""
MOST_RUNS = 8
"""Number of colours that people tell apart, those with a colour-blind eye included."""


@dataclass(frozen=True)
class Compared:
    """One run of the comparison."""

    name: str
    color: int
    facts: RunFacts
    status: Status


Events = Callable[[Compared], Sequence[Numbers]]
"""Function that gives the records or the evaluations of a run."""


def write_comparison(
    folders: Sequence[Path], output: Path | None = None, reload_s: float | None = None
) -> Path:
    """Replaces the page about these runs, whole or not at all; returns its path.

    With `reload_s`, a browser loads it again every so many seconds. Raises InputError if a run is named twice
    or cannot be read, or if there are more than MOST_RUNS.
    """
    if len(folders) > MOST_RUNS:
        raise InputError(
            f"{many(len(folders), 'run')} are too many for one page: give at most {MOST_RUNS}, so that their "
            "curves can be told apart"
        )
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise InputError("a run is named twice: name each run of a comparison once")
    path = output if output is not None else folders[0].resolve().parent / COMPARISON_FILE
    return write_page(path, page([read_run(folder) for folder in folders], reload_s))


def page(all_facts: Sequence[RunFacts], reload_s: float | None = None) -> str:
    """Returns the page's text, the same for the same facts."""
    names = run_names([facts.folder for facts in all_facts])
    runs = [
        Compared(name, color, facts, status(facts))
        for color, (name, facts) in enumerate(zip(names, all_facts, strict=True), start=1)
    ]
    labels, table = results(runs)
    return render(
        "compare.html.j2",
        reload_s,
        name=f"{many(len(runs), 'run')} compared",
        runs=runs,
        labels=labels,
        table=table,
        training=list(training(runs)),
        evaluation=list(evaluation(runs)),
        differing=by_topic(differences(all_facts)),
        remarks=[f"{run.name}: {remark}" for run in runs for remark in run.facts.remarks],
    )


def run_names(folders: Sequence[Path]) -> list[str]:
    """Returns the folders' names, with as many folders above as they need to differ."""
    paths = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def results(runs: Sequence[Compared]) -> tuple[list[str], list[list[str]]]:
    """Returns the labels of the figures that any run has, and the figures of each run by label."""
    figures = [{tile.label: tile.value for tile in tiles(run.facts)} for run in runs]
    labels = list(dict.fromkeys(label for each in figures for label in each))
    return labels, [[each.get(label, "") for label in labels] for each in figures]


def by_topic(found: Sequence[Difference]) -> dict[str, list[Difference]]:
    """Returns what differs in job, data and environment, by topic; the page has its own table of results."""
    topics: dict[str, list[Difference]] = {}
    for each in found:
        if each.topic != "results":
            topics.setdefault(each.topic, []).append(each)
    return topics


def training(runs: Sequence[Compared]) -> Iterator[Chart]:
    """Yields the curves of training over each other.

    Runs with different global batches are also compared over their samples.
    """
    for title, name, settings in LINES:
        if lines := _lines(runs, _records, name):
            yield line_chart(title, lines, **settings)
        optims = [run.facts.job.get("optim") for run in runs]
        batches = {str(optim.get("global_batch_size") if isinstance(optim, dict) else "") for optim in optims}
        if name == "loss" and len(batches) > 1 and (over := _lines(runs, _records, name, "samples")):
            yield line_chart("Loss over samples", over, **{**settings, "x_title": "samples"})


def evaluation(runs: Sequence[Compared]) -> Iterator[Chart]:
    """Yields a chart for each metric that two runs have, or that one run has measured twice."""
    events = [event for run in runs for event in run.facts.metrics.evaluations]
    for name in metric_names(events):
        lines = _lines(runs, _evaluations, name)
        values = {value for line in lines for value in line.values}
        if sum(len(line.steps) for line in lines) > 1 and len(values) > 1:
            yield line_chart(metric_title(name), lines, **metric_axis(name, events))


_records: Events = attrgetter("facts.metrics.records")
_evaluations: Events = attrgetter("facts.metrics.evaluations")


def _lines(runs: Sequence[Compared], events: Events, name: str, over: str = "step") -> list[Series]:
    """Returns a line for each run that has the figure."""
    known = [(run, [each for each in events(run) if name in each and over in each]) for run in runs]
    return [series(found, name, run.name, run.color, over) for run, found in known if found]
