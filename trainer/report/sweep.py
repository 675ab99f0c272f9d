"""Makes one HTML page about the runs of a sweep: a table of results, and curves of the best runs. No torch.

It follows the rules of `trainer.report.page`: it loads nothing, and escapes everything from a folder.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import InputError
from trainer.report.compare import MOST_RUNS, Compared, evaluation, training
from trainer.report.cost import samples_per_s
from trainer.report.folder import Numbers, RunFacts, has_started, read_run
from trainer.report.headline import Status, status
from trainer.report.page import render, write_page
from trainer.report.wording import metric_names, metric_text, metric_title, number
from trainer.run.layout import REPORT_FILE, SWEEP_REPORT_FILE
from trainer.run.sweep_record import SweepRecord, read_sweep
from trainer.text.wording import many

_NOT_BEGUN = Status("open", "not begun", "")
_LOSS, _SPEED = "loss", "samples_per_s"


@dataclass(frozen=True)
class Cell:
    """One figure of a run, as text; `best` if no other run has a better one."""

    text: str = ""
    best: bool = False


@dataclass(frozen=True)
class TrialRow:
    """One run of the sweep in the table."""

    name: str
    report: str
    """Path of the run's own report from the sweep's page; "" if there is none."""
    values: Sequence[str]
    status: Status
    cells: Sequence[Cell]


def write_sweep(folder: Path, output: Path | None = None, reload_s: float | None = None) -> Path:
    """Replaces the page about a sweep, whole or not at all; returns its path, by default in its folder.

    With `reload_s`, a browser loads it again every so many seconds. Raises InputError if the sweep has no
    record that can be read.
    """
    path = output if output is not None else folder / SWEEP_REPORT_FILE
    return write_page(path, page(read_sweep(folder), runs_of(folder), reload_s))


def runs_of(folder: Path) -> dict[str, Path]:
    """Returns the folders of the sweep's runs by their names, those that are missing included."""
    return {name: folder.resolve().parent / name for name in read_sweep(folder).runs}


def existing_runs(folder: Path) -> list[Path]:
    """Returns the folders of those runs of the sweep that were started or submitted."""
    return [run for run in runs_of(folder).values() if run.is_dir()]


def page(record: SweepRecord, folders: Mapping[str, Path], reload_s: float | None = None) -> str:
    """Returns the page's text, the same for the same files."""
    facts = {name: read for name, folder in folders.items() if (read := _read(folder)) is not None}
    keys = list(dict.fromkeys(key for values in record.runs.values() for key in values))
    figures = {name: _figures(each) for name, each in facts.items()}
    titles = list(dict.fromkeys(title for each in figures.values() for title in each))
    shown = _best_runs(facts, figures)
    return render(
        "sweep.html.j2",
        reload_s,
        name=f"{record.job}: {many(len(record.runs), 'run')}",
        keys=keys,
        titles=[_title(title) for title in titles],
        rows=[
            TrialRow(
                name,
                f"../{name}/{REPORT_FILE}" if (folders[name] / REPORT_FILE).exists() else "",
                [values.get(key, "") for key in keys],
                status(facts[name]) if name in facts else _NOT_BEGUN,
                [_cell(name, title, figures, facts) for title in titles],
            )
            for name, values in record.runs.items()
        ],
        runs=shown,
        cut=len(facts) > len(shown),
        training=list(training(shown)),
        evaluation=list(evaluation(shown)),
        remarks=[f"{name}: {remark}" for name, each in facts.items() for remark in each.remarks],
    )


def _read(folder: Path) -> RunFacts | None:
    """Returns the facts of a run; None if it has not begun, or if this machine does not see it."""
    try:
        return read_run(folder) if folder.is_dir() and has_started(folder) else None
    except InputError:  # it was removed meanwhile
        return None


def _figures(facts: RunFacts) -> dict[str, float]:
    """Returns step, loss, the metrics of the last evaluation and the speed, if the run has them."""
    records, evaluations = facts.metrics.records, facts.metrics.evaluations
    last: Numbers = records[-1] if records else {}
    found = {name: last[name] for name in ("step", _LOSS) if name in last}
    measured: Numbers = evaluations[-1] if evaluations else {}
    found |= {name: value for name, value in measured.items() if name != "step" and not _is_count(name)}
    speed = samples_per_s(facts)
    return found | ({_SPEED: speed} if speed else {})


def _is_count(name: str) -> bool:
    return name.endswith(("_samples", "_classes"))


def _title(name: str) -> str:
    return "samples/s" if name == _SPEED else metric_title(name)


def _better(name: str) -> float:
    """Returns 1 if more of a figure is better, -1 if less is, 0 if neither."""
    if name in ("step", _SPEED):
        return 0.0
    return -1.0 if name == _LOSS or name.endswith(("_rank", "_loss")) else 1.0


def _cell(
    name: str, title: str, figures: Mapping[str, Mapping[str, float]], facts: Mapping[str, RunFacts]
) -> Cell:
    value = figures.get(name, {}).get(title)
    if value is None:
        return Cell()
    others = [each[title] for each in figures.values() if math.isfinite(each.get(title, math.nan))]
    sign = _better(title)
    best = sign * value >= max(sign * other for other in others) if others and math.isfinite(value) else False
    text = (
        metric_text(title, value, facts[name].metrics.evaluations)
        if title in metric_names(facts[name].metrics.evaluations)
        else number(round(value, 1) if title == _SPEED else value)
    )
    return Cell(text, bool(sign) and best and len(set(others)) > 1)


def _best_runs(facts: Mapping[str, RunFacts], figures: Mapping[str, Mapping[str, float]]) -> list[Compared]:
    """Returns the runs whose curves are drawn, in the table's order: the best by metric, else by loss."""
    ranked = next(
        (title for each in figures.values() for title in each if title != _LOSS and _better(title)), _LOSS
    )

    def merit(name: str) -> float:
        value = _better(ranked) * figures[name].get(ranked, math.nan)
        return value if math.isfinite(value) else -math.inf

    best = set(sorted(facts, key=merit, reverse=True)[:MOST_RUNS])
    chosen = [name for name in facts if name in best]
    return [Compared(name, color, facts[name], status(facts[name])) for color, name in enumerate(chosen, 1)]
