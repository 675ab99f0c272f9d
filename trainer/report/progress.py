"""Progress of a run, read from its run folder, for `clipship status`, in words and as `--json` prints it.

Imports no torch and asks no scheduler.
"""

import datetime
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.report.cost import (
    energy_j,
    gpu_hours,
    left_s,
    reading_of,
    reading_text,
    samples_per_s,
    taken_s,
    total_steps,
)
from trainer.report.folder import Numbers, RunFacts, has_started, read_run
from trainer.report.liveness import State, inspect, rows
from trainer.report.wording import metric_title, percent, shown_metrics, span
from trainer.run.checkpoints import newest_whole
from trainer.run.exit_record import rank_name
from trainer.run.layout import CHECKPOINTS, METRICS_FILE
from trainer.supervise.coordinate.membership import exclusions_text
from trainer.supervise.restarts import parts_text
from trainer.telemetry.goodput import CAUSES, account, shown_causes
from trainer.text.wording import duration, many

_RECENT_RESTARTS = 3


def progress(folder: Path, job: str, to: str | None, *, wide: bool = False) -> Iterator[tuple[str, str]]:
    """Yields topic and text of each row of the status.

    The rows are step, speed, time left, evaluation and last checkpoint; then how the run ended or that it
    died, and how to resume it. `job` is the job file as the user calls it, `to` the scheduler that the run
    was submitted to. With `wide`, the evaluation has every metric, and each cause of lost time a row.
    """
    if not has_started(folder):
        yield "step", "none: no rank has started"
        return
    facts = read_run(folder, recent=True)
    records = facts.metrics.records
    liveness = inspect(folder, facts)
    if not records:
        yield "step", "none: no step is logged yet"
    else:
        yield from _speed(facts, going_on=liveness.state == "alive", logged_s=_logged_ago_s(facts))
    if facts.metrics.evaluations:
        yield "evaluation", _evaluation(facts.metrics.evaluations[-1], wide=wide)
    if why := facts.result.get("evaluation_failed"):
        yield "evaluation", f"the last one failed: {why}"
    if (step_and_path := last_checkpoint(facts)) is not None:
        step, path = step_and_path
        yield "checkpoint", f"step {step}, {path.name}"
    if facts.copies:
        yield "copies", _copies(facts.copies)
    yield from _times(facts, wide=wide)
    if (reading := reading_of(facts.metrics)) is not None:
        yield "reading", reading_text(reading)
    yield from _restarts(facts.restarts)
    if facts.result.get("reason"):
        yield "result", str(facts.result["reason"])
    elif facts.exit:
        yield "ended", _ended(facts.exit)
    yield from rows(facts, liveness, job, to)
    for remark in facts.remarks:
        yield "remark", remark


def last_checkpoint(facts: RunFacts) -> tuple[int, Path] | None:
    """Returns step and folder of the newest whole checkpoint; without any, of the last that was recorded."""
    recorded = facts.metrics.checkpoints[-1:]
    return newest_whole(facts.folder / CHECKPOINTS) or next(
        ((int(last["step"]), Path(str(last["checkpoint"]))) for last in recorded), None
    )


def _copies(record: Mapping[str, Any]) -> str:
    """Returns up to which step the checkpoints are copied, and what keeps the others."""
    step, behind = record.get("step"), record.get("behind")
    text = f"none yet in {record.get('to')}" if step is None else f"step {step} in {record.get('to')}"
    text += f"; {many(behind, 'checkpoint')} behind" if isinstance(behind, int) and behind else ""
    return text + (f": {record['failed']}" if record.get("failed") else "")


def _speed(facts: RunFacts, *, going_on: bool, logged_s: float) -> Iterator[tuple[str, str]]:
    """Yields rows for the figures that the records have.

    Lines written by hand may lack any figure but step and loss.
    """
    last, total = facts.metrics.records[-1], total_steps(facts)
    epoch = f", epoch {last['epoch'] + 1:g}" if "epoch" in last else ""
    of_all = f" of {total:,}{epoch}" if total else ""
    yield "step", f"{last['step']:,}{of_all}, loss {last['loss']:.4f}, logged {duration(logged_s)} ago"
    if (speed := samples_per_s(facts)) is not None:
        yield "speed", f"{speed:,.1f} samples/s"
    if going_on and (seconds := left_s(facts)) is not None:
        yield "time left", duration(seconds)


def _times(facts: RunFacts, *, wide: bool) -> Iterator[tuple[str, str]]:
    """Yields what share of the run's time was useful, and where the rest went."""
    times = account(facts.times)
    if times.useful_share is None:
        return
    causes = list(shown_causes(times))
    lost = ", ".join(f"{cause} {percent(seconds / times.whole_s)}" for cause, seconds in causes)
    useful = f"{percent(times.useful_share)} of {span(times.whole_s)} in steps that counted"
    yield "useful", useful + (f"; lost: {lost}" if lost and not wide else "")
    for cause, seconds in causes if wide else []:
        yield "lost", f"{percent(seconds / times.whole_s):>7}  {span(seconds):>8}  {CAUSES[cause]}"


def _restarts(restarts: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields a row for each of the last restarts of the ranks; before them their number if there are more."""
    if len(restarts) > _RECENT_RESTARTS:
        yield "restarts", f"{len(restarts)} in this start, of which the last {_RECENT_RESTARTS}:"
    for restart in restarts[-_RECENT_RESTARTS:]:
        step, seconds = restart.get("from_step"), restart.get("seconds")
        where = f"went on from step {step}" if step else "started again from the beginning"
        took = f"new step after {seconds:g} s" if isinstance(seconds, int | float) else "no new step yet"
        took += f" ({parts})" if (parts := parts_text(restart.get("parts"))) else ""
        who = rank_name(restart.get("rank", 0), restart.get("node", ""))
        yield "restart", f"{who}: {restart.get('cause')}; all ranks {where}, {took}"
    for phrase in exclusions_text(restarts[-1].get("left_out")) if restarts else []:
        yield "left out", phrase


def _logged_ago_s(facts: RunFacts) -> float:
    """Returns the seconds since the last record. In a copied run folder the files are younger than that.

    goodput.jsonl, which has times, may have gaps: then it knows nothing of the record's step.
    """
    written, step = (facts.folder / METRICS_FILE).stat().st_mtime, facts.metrics.records[-1]["step"]
    told = [its.last for its in facts.times if its.step >= step]
    return max(0.0, time.time() - min([written, *told[-1:]]))


def _evaluation(values: Numbers, *, wide: bool) -> str:
    shown = (f"{metric_title(name)} {text}" for name, text in shown_metrics(values, wide=wide).items())
    return f"step {values['step']:,.0f}: {', '.join(shown)}"


def _ended(record: Mapping[str, Any]) -> str:
    who = rank_name(record.get("rank", 0), record.get("node"), record.get("generation", 1))
    return f"exit code {record.get('exit_code')}, {who}: {record.get('reason')} ({_when(record.get('time'))})"


def _when(at: object) -> str:
    """Returns a time in seconds since the epoch as this machine's clock shows it."""
    try:
        return f"{datetime.datetime.fromtimestamp(at).astimezone():%F %T}"  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, OSError):  # what a file may hold
        return "at an unknown time"


_ENDS = ("exit_code", "reason", "rank", "node", "time")


def state_of(folder: Path) -> dict[str, Any]:
    """Returns the fields of a run folder; before its first rank has started only `state`.

    Names and units are those of metrics.jsonl; epochs count from 0. What is not known is None.
    """
    if not has_started(folder):
        return {"state": "none"}
    facts = read_run(folder, recent=True)
    liveness, last, times = inspect(folder, facts), last_checkpoint(facts), account(facts.times)
    return {
        "state": liveness.state,
        "done": facts.result.get("reason") == "done",
        "last_sign": liveness.last or None,
        **_progress(facts, liveness.state),
        "evaluation": facts.metrics.evaluations[-1] if facts.metrics.evaluations else None,
        "checkpoint": {"step": last[0], "path": str(last[1])} if last else None,
        "copies": dict(facts.copies) or None,
        "taken_s": taken_s(facts),
        "gpu_hours": gpu_hours(facts),
        "energy_j": energy_j(facts),
        "useful_share": times.useful_share,
        "lost_s": dict(times.lost_s),
        "reading": reading_of(facts.metrics),
        "restarts": len(facts.restarts),
        "end": {name: facts.exit.get(name) for name in _ENDS} if facts.exit else None,
        "remarks": list(facts.remarks),
    }


def _progress(facts: RunFacts, state: State) -> dict[str, Any]:
    records = facts.metrics.records
    last: Mapping[str, float] = records[-1] if records else {}
    return {
        "step": last.get("step"),
        "steps": total_steps(facts),
        "epoch": last.get("epoch"),
        "loss": last.get("loss"),
        "samples_per_s": samples_per_s(facts),
        "left_s": left_s(facts) if state == "alive" else None,
    }
