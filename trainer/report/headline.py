"""Shows how a run ended, and the numbers that people ask for first. Pure; no torch."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import EXIT_PREEMPTED, EXIT_TIMED_OUT
from trainer.report.cost import (
    cache_text,
    energy_j,
    gpu_hours,
    left_s,
    reading_of,
    taken_s,
    total_steps,
    usual_records,
)
from trainer.report.figures import PARTS
from trainer.report.folder import Numbers, RunFacts
from trainer.report.wording import (
    energy_of,
    is_share,
    large,
    metric_names,
    metric_text,
    metric_title,
    number,
    percent,
    size_of,
    time_of,
)
from trainer.run.exit_record import rank_name
from trainer.telemetry.goodput import account
from trainer.text.wording import duration, many

_CHECKPOINTS = 20
_SHOWN_METRICS = ("zero_shot_top1", "zero_shot_top5", "retrieval_i2t_r1", "retrieval_t2i_r1")


@dataclass(frozen=True)
class Status:
    """End of a run; `kind` is done, stopped, failed or open and gives the page's colour."""

    kind: str
    word: str
    sentence: str


@dataclass(frozen=True)
class Tile:
    """One number of the headline."""

    label: str
    value: str
    note: str = ""


def status(facts: RunFacts) -> Status:
    """Returns the status from result.json, else from the first cause of the end."""
    if facts.result.get("reason") == "done":
        return Status("done", "done", "")
    if not facts.result and not facts.exit:
        return Status(
            "open",
            "not finished",
            "No end is recorded: the run is still going on, or it was killed together with its supervisors.",
        )
    end: Mapping[str, Any] = facts.exit or facts.result
    code, reason = end.get("exit_code"), str(end.get("reason", "no reason is recorded"))
    if code == EXIT_PREEMPTED:
        return Status("stopped", "stopped", f"{reason}. The same command resumes from the last checkpoint.")
    who = rank_name(end.get("rank"), end.get("node"), end.get("generation", 1))
    where = f"{who}: " if "rank" in end else ""
    word = "timed out" if code == EXIT_TIMED_OUT else f"failed, exit code {code}"
    return Status("failed", word, where + reason)


def tiles(facts: RunFacts) -> list[Tile]:
    """Returns the tiles for which the run has numbers."""
    return [*_progress(facts), *_measured(facts.metrics.evaluations), *_speed(facts)]


def not_finite(records: Sequence[Numbers]) -> str:
    """Returns a sentence about the first loss that is NaN or infinite; empty if there is none."""
    first = next((record["step"] for record in records if not math.isfinite(record.get("loss", 0.0))), None)
    return "" if first is None else f"The loss is NaN or infinite at step {number(first)}."


def _progress(facts: RunFacts) -> Iterator[Tile]:
    records = facts.metrics.records
    if not records:
        return
    last, first = records[-1], records[0]
    total = _number(facts.result, "steps") or total_steps(facts)
    yield Tile("steps", number(last["step"]), f"of {number(total)}" if total else "")
    if "samples" in last:
        epoch = f"epoch {number(last['epoch'] + 1)}" if "epoch" in last else ""
        yield Tile("samples", large(last["samples"]), epoch)
    yield Tile("loss", number(last["loss"]), f"from {number(first['loss'])}")


def _measured(evaluations: Sequence[Numbers]) -> Iterator[Tile]:
    """Yields a tile with the last value of each metric, and with the best one if that differs."""
    for name in [name for name in metric_names(evaluations) if name in _SHOWN_METRICS]:
        measured = [(event[name], event["step"]) for event in evaluations if name in event]
        value, step = measured[-1]
        best, best_step = max(measured)
        note = (
            f"best {metric_text(name, best, evaluations)} at step {number(best_step)}"
            if best > value
            else f"at step {number(step)}"
        )
        yield Tile(metric_title(name).removeprefix("retrieval "), metric_text(name, value, evaluations), note)


def _speed(facts: RunFacts) -> Iterator[Tile]:
    usual = usual_records(facts)
    speeds = [
        record["samples_per_s"] for record in usual if math.isfinite(record.get("samples_per_s", math.nan))
    ]
    ranks = int(_number(facts.result, "world_size")) or len(facts.environment)
    if speeds:
        speed = statistics.median(speeds)
        by_rank = f"{number(round(speed / ranks, 1))} per rank" if ranks else ""
        yield Tile("samples per second", number(round(speed, 1)), by_rank)
    seconds = {name: sum(record.get(field, 0.0) for record in usual) for name, field, _ in PARTS}
    whole = sum(seconds.values())
    if 0 < whole < math.inf:
        in_data = f"{percent(seconds['data'] / whole)} in data"
        yield Tile("time in compute", percent(seconds["compute"] / whole), in_data)
    times = account(facts.times)
    if times.useful_share is not None:
        yield Tile("useful time", percent(times.useful_share), "in steps that counted")
    if (reading := reading_of(facts.metrics)) is not None:
        requests = f"in {many(int(reading['requests']), 'request')}"
        yield Tile("read", size_of(reading["bytes"]), cache_text(reading) or requests)
    yield from _cost(facts, ranks)


def _cost(facts: RunFacts, ranks: int) -> Iterator[Tile]:
    """Yields tiles with time left and taken, hours of GPUs and energy."""
    left, taken = left_s(facts) if status(facts).kind == "open" else None, taken_s(facts)
    hours, joules = gpu_hours(facts), energy_j(facts)
    if left is not None:
        yield Tile("time left", duration(left), "at its last speed")
    if taken is not None:
        yield Tile("time", duration(taken), many(ranks, "rank") if ranks else "")
    if hours is not None:
        yield Tile("GPU-hours", number(float(f"{hours:.3g}")), "one GPU per rank")
    if joules is not None:
        yield Tile("energy of GPUs", energy_of(joules), "in logged steps, as NVML counts")


def metric_rows(evaluations: Sequence[Numbers]) -> list[tuple[str, str, str]]:
    """Returns metric, last value and best value with its step (shares only), for the table of evaluations."""
    rows = []
    for name in metric_names(evaluations):
        measured = [(event[name], event["step"]) for event in evaluations if name in event]
        best, step = max(measured, key=lambda pair: (pair[0], -pair[1]))
        best_text = f"{metric_text(name, best, evaluations)} at step {number(step)}"
        shown = best_text if is_share(name, evaluations) else ""
        rows.append((metric_title(name), metric_text(name, measured[-1][0], evaluations), shown))
    return rows


def checkpoint_rows(checkpoints: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Returns step, folder, size and write time of the last _CHECKPOINTS checkpoints."""
    return [
        (
            number(written["step"]),
            str(written["checkpoint"]),
            _shown(size_of, written, "checkpoint_bytes"),
            _shown(time_of, written, "write_s"),
        )
        for written in checkpoints[-_CHECKPOINTS:]
    ]


def _shown(text: Callable[[float], str], event: Mapping[str, Any], name: str) -> str:
    return text(_number(event, name)) if name in event else ""


def _number(table: Any, name: str) -> float:
    """Returns the table's number; 0 if there is no positive number, or if it is no table."""
    value = table.get(name) if isinstance(table, Mapping) else None
    return value if isinstance(value, (int, float)) and 0 < value < 1e15 else 0
