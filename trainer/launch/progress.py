"""How far a run is, from its run folder: for `clipship status`. Imports no torch, asks no scheduler."""

import datetime
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from trainer.report.folder import Numbers, RunFacts, read_run
from trainer.telemetry import duration

_RECENT = 5
"""Records that the speed is averaged over."""
_TOTAL = re.compile(r"step +\d+/(\d+) ")
_LOG_TAIL = 64 * 1024


def progress(folder: Path) -> Iterator[tuple[str, str]]:
    """Topic and text: step, speed, time left, evaluation, last checkpoint, and how the run ended if it did."""
    if not any((folder / name).exists() for name in ("job.toml", "metrics.jsonl", "exit.json")):
        yield "step", "none: no rank has begun"
        return
    facts = read_run(folder)
    records = facts.metrics.records
    if not records:
        yield "step", "none: no step is logged yet"
    else:
        yield from _speed(records, _total_steps(facts), going_on=not (facts.result or facts.exit), written=_age(folder / "metrics.jsonl"))
    if facts.metrics.evaluations:
        yield "evaluation", _evaluation(facts.metrics.evaluations[-1])
    if facts.metrics.checkpoints:
        last = facts.metrics.checkpoints[-1]
        yield "checkpoint", f"step {last['step']}, {Path(str(last['checkpoint'])).name}"
    if facts.result.get("reason"):
        yield "result", str(facts.result["reason"])
    elif facts.exit:
        yield "ended", _ended(facts.exit)
    for remark in facts.remarks:
        yield "remark", remark


def _speed(records: Sequence[Numbers], total: int | None, *, going_on: bool, written: float) -> Iterator[tuple[str, str]]:
    last = records[-1]
    recent = records[1:][-_RECENT:] or records[-1:]  # the first of a start waits for its loaders
    of_all = f" of {total:,}, epoch {last['epoch']:g}" if total else ""
    yield "step", f"{last['step']:,}{of_all}, loss {last['loss']:.4f}, logged {duration(written)} ago"
    yield "speed", f"{fmean(record['samples_per_s'] for record in recent):,.1f} samples/s"
    if going_on and total:
        yield "time left", duration((total - last["step"]) * fmean(record["step_s"] for record in recent))


def _total_steps(facts: RunFacts) -> int | None:
    """The job says it, or rank 0's own log where it follows from epochs and samples."""
    steps = facts.job.get("optim", {}).get("steps")
    if isinstance(steps, int):
        return steps
    try:
        with open(facts.folder / "logs" / "rank-00000.log", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_TAIL))
            found = _TOTAL.findall(file.read().decode(errors="replace"))
    except OSError:
        return None
    return int(found[-1]) if found else None


def _age(path: Path) -> float:
    return max(0.0, time.time() - path.stat().st_mtime)


def _evaluation(values: Numbers) -> str:
    shown = (f"{name} {value:g}" for name, value in values.items() if name != "step")
    return f"step {values['step']:g}: {', '.join(shown)}"


def _ended(found: Mapping[str, Any]) -> str:
    when = datetime.datetime.fromtimestamp(float(found.get("time", 0.0))).astimezone()
    return f"exit code {found.get('exit_code')}, rank {found.get('rank')} on {found.get('node')}: {found.get('reason')} ({when:%F %T})"
