"""Tells what a run takes: time left and taken, hours of GPUs, energy, reading. Pure; no torch."""

import math
import re
from collections.abc import Sequence
from statistics import fmean

from trainer.report.folder import Metrics, Numbers, RunFacts
from trainer.report.wording import percent, size_of, span
from trainer.run.layout import LOGS, rank_log
from trainer.safe_io.plain import last_text
from trainer.telemetry.goodput import account, by_generation
from trainer.text.wording import many

_RECENT = 5
"""Number of records that the speed is averaged over."""
_MOST_STEPS = 10**15
"""Number of steps that no run has; a file may hold any."""
_TOTAL = re.compile(r"step +\d+/(\d{1,15}) ")
_LOG_TAIL = 64 * 1024


def total_steps(facts: RunFacts) -> int | None:
    """Returns the run's number of steps; None if it is not known.

    The job gives it, or else, if it follows from epochs and samples or from several stages, rank 0's log.
    """
    optim = facts.job.get("optim")
    steps = optim.get("steps") if isinstance(optim, dict) else None
    if isinstance(steps, int) and 0 < steps < _MOST_STEPS and not facts.job.get("stage"):
        return steps
    try:
        totals = _TOTAL.findall(last_text(facts.folder / LOGS / rank_log(0), _LOG_TAIL))
    except OSError:
        return None
    return int(totals[-1]) if totals else None


def samples_per_s(facts: RunFacts) -> float | None:
    """Returns the speed of the last records; None if they do not have it."""
    speeds = [record["samples_per_s"] for record in _recent(facts) if "samples_per_s" in record]
    return fmean(speeds) if speeds else None


def left_s(facts: RunFacts) -> float | None:
    """Returns the seconds that the steps left take at the speed of the last records.

    None if the length or the speed of the run is not known. Evaluations and saves to come are not counted.
    """
    records, total = facts.metrics.records, total_steps(facts)
    times = [record["step_s"] for record in _recent(facts) if math.isfinite(record.get("step_s", math.nan))]
    return max(0.0, (total - records[-1]["step"]) * fmean(times)) if total and times else None


def usual_records(facts: RunFacts) -> Sequence[Numbers]:
    """Returns the records without the first one of each start, generation and stage; all if no other is left.

    Such a first step includes the wait for its loaders.
    """
    records = facts.metrics.records
    firsts = {its.from_step + 1 for its in facts.times if its.ready is not None}
    return [record for record in records[1:] if record["step"] not in firsts] or records


def _recent(facts: RunFacts) -> Sequence[Numbers]:
    """Returns the last records that tell the usual speed."""
    return usual_records(facts)[-_RECENT:]


def taken_s(facts: RunFacts) -> float | None:
    """Returns the seconds of all starts, without the time between them; None if they are not known."""
    whole_s = account(facts.times).whole_s
    if whole_s > 0:
        return whole_s
    seconds = facts.result.get("seconds")
    return seconds if isinstance(seconds, int | float) and 0 < seconds < math.inf else None


def gpu_hours(facts: RunFacts) -> float | None:
    """Returns hours of the run times its ranks, each of which has a GPU; None for a run on CPUs.

    A generation counts with the ranks that it had, as far as its lines say so, else with those of the last.
    """
    usual = len(facts.environment)
    if not usual or facts.environment[0].get("device", "cpu").startswith("cpu"):
        return None
    seconds = [its.whole_s for its in by_generation(facts.times)]
    if not sum(seconds):
        taken = taken_s(facts)
        return None if taken is None else taken * usual / 3600
    ranks = [its.ranks or usual for its in facts.times]
    return sum(each * size for each, size in zip(seconds, ranks, strict=True)) / 3600


def energy_j(facts: RunFacts) -> float | None:
    """Returns the joules that the GPUs took in steps that counted; None where no GPU counts them."""
    whole = facts.metrics.total("gpu_joules")
    return whole if math.isfinite(whole) and whole > 0 else None


_READING = {
    "requests": "read_requests",
    "bytes": "read_bytes",
    "wait_s": "read_wait_s",
    "cache_hits": "cache_hits",
}
"""Fields of a record, all ranks, by their names in `clipship status --json`."""


def reading_of(metrics: Metrics) -> dict[str, float] | None:
    """Returns what a run's data have cost to read, over its records; None if none of them read anything."""
    if not any("read_requests" in record for record in (metrics.so_far, *metrics.records)):
        return None
    return {name: metrics.total(field) for name, field in _READING.items()}


def reading_text(sums: dict[str, float]) -> str:
    """Returns what the sums say: bytes, requests, waiting, and the share of reads that the cache had."""
    waits = f"whose waits add up to {span(sums['wait_s'])}"
    kept = f"; {cached}" if (cached := cache_text(sums)) else ""
    return f"{size_of(sums['bytes'])} in {many(int(sums['requests']), 'request')}, {waits}{kept}"


def cache_text(sums: dict[str, float]) -> str:
    """Returns the share of the reads that the cache had; empty if it had none."""
    hits = sums["cache_hits"]
    return f"{percent(hits / (hits + sums['requests']))} of the reads from data.cache" if hits else ""
