"""Values of `clipship plan goodput` that a run or a job has, each with its source. Imports no torch."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.comm.backends import keeps_in_memory
from trainer.config import Job
from trainer.config.loader import load_job
from trainer.errors import InputError
from trainer.launch.submission import find_run
from trainer.report.folder import RunFacts, read_run
from trainer.run.layout import JOB_FILE
from trainer.telemetry.goodput import PLANNED, by_generation, steps_done, usual_step_s

_ENOUGH_FAULTS = 3
"""Faults from which on a run says something about the time between them."""


@dataclass(frozen=True)
class Value:
    """A value of a plan, under the name of its field, with its source in words."""

    name: str
    value: Any
    source: str


def values_of(name: str) -> dict[str, Value]:
    """Returns the values that a run (folder, job file or name in ./runs) or a job file has.

    What a run measured stands before what its job says. Raises InputError if there is neither.
    """
    folder = _run_of(name)
    job = load_job(Path(name) if folder is None else folder / JOB_FILE)
    values = list(_of_job(job))
    if folder is not None:
        facts = read_run(folder)
        values += _of_run(facts, job)
    step_s = next((value.value for value in values if value.name == "step_s"), None)
    values += _interval(job, step_s)
    return {value.name: value for value in values}


def _run_of(name: str) -> Path | None:
    """Returns the run folder; None for a job file that has none yet. Raises InputError if it is neither."""
    try:
        return find_run(name)
    except InputError:
        if Path(name).is_file():
            return None
        raise


def _of_job(job: Job) -> Iterator[Value]:
    recovery = job.recovery
    yield Value("nodes", job.resources.nodes, "job")
    yield Value("spares", recovery.spare_nodes, "job")
    if recovery.min_nodes is not None:
        yield Value("min_nodes", recovery.min_nodes, "job")
    yield Value("memory_share", 1.0 if keeps_in_memory(job) else 0.0, "job")


def _interval(job: Job, step_s: float | None) -> Iterator[Value]:
    minutes, steps = job.checkpoint.every_minutes, job.checkpoint.every_steps
    seconds = [60 * minutes] if minutes is not None else []
    seconds += [steps * step_s] if steps is not None and step_s is not None else []
    if seconds:
        yield Value("interval_s", min(seconds), "job")


def _of_run(facts: RunFacts, job: Job) -> Iterator[Value]:
    """Yields what the run measured; nothing that it had no occasion to measure."""
    parts = by_generation(facts.times)
    lost = {name: sum(part.lost_s[name] for part in parts) for name in (parts[0].lost_s if parts else {})}
    useful_s = sum(part.useful_s for part in parts)
    nodes = len({rank.get("node") for rank in facts.environment}) or job.resources.nodes
    yield Value("nodes", nodes, "run")
    if (step_s := usual_step_s(facts.times)) is not None:
        evaluation_s = lost["evaluation"] / max(1, steps_done(facts.times))
        yield Value("step_s", step_s + evaluation_s, "measured")
    if parts:
        yield Value("start_s", parts[0].lost_s["start"], "measured")
        beside = lost["data"] + lost["stragglers"] + lost["evaluation"]
        yield Value("overhead_share", beside / max(useful_s + beside, 1e-9), "measured")
    faults = sum(1 for its in facts.times if its.restart and its.restart.get("kind") != PLANNED)
    if faults:
        yield Value("detect_s", lost["detection"] / faults, "measured")
        yield Value("restart_s", lost["recovery"] / faults, "measured")
    if faults >= _ENOUGH_FAULTS:
        whole_s = useful_s + sum(lost.values())
        yield Value("node_mtbf_s", whole_s * nodes / faults, "measured")
    if saves := sum(its.saves for its in facts.times):
        yield Value("checkpoint_s", lost["checkpoint"] / saves, "measured")
    written = (event.get("write_s") for event in facts.metrics.checkpoints)
    if times := [seconds for seconds in written if isinstance(seconds, int | float)]:
        yield Value("write_s", statistics.median(times), "measured")
