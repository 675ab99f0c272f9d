"""Reads a run folder as it is: unfinished, failed, half written or empty. No torch; nothing here raises for what a file holds.

What cannot be read becomes a remark, so that the rest is still shown.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import tomli_w

from trainer.errors import InputError
from trainer.report.board import BOARD_FILE, Row, read_rows
from trainer.telemetry import Record

T = TypeVar("T")
Numbers = Mapping[str, float]

_RECORD = {field.name for field in fields(Record)}
_EVALUATED = ("zero_shot_", "retrieval_")
"""How the names of what an evaluation measures begin: result.json has other numbers beside them."""
_LARGEST = 1e300
_LOG_LINES = 40
_LOG_BYTES = 64 * 1024
_LOGS = 8
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\t\n\x20-\x7e\x80-\U0010ffff]")


@dataclass(frozen=True)
class Metrics:
    """The lines of metrics.jsonl by what they say."""

    records: Sequence[Numbers] = ()
    """Of the loop, in the order of their steps: the fields of `telemetry.Record` that its version wrote."""
    evaluations: Sequence[Numbers] = ()
    """`step` and what was measured."""
    checkpoints: Sequence[Mapping[str, Any]] = ()
    """`step`, `checkpoint`, and what it cost."""


@dataclass(frozen=True)
class RunFacts:
    """What a run folder says. A missing file is an empty value."""

    folder: Path
    metrics: Metrics
    job: Mapping[str, Any]
    job_text: str
    """As TOML; the values of [env], which may be secrets, are left out."""
    result: Mapping[str, Any]
    exit: Mapping[str, Any]
    """The first cause of the run's end; see `trainer.exits.ExitRecord`."""
    diagnosis: Mapping[str, Any]
    environment: Sequence[Mapping[str, str]]
    """Of each rank."""
    board: Sequence[Row]
    logs: Mapping[int, Sequence[str]]
    """The last lines by rank: of the ranks that failed, or of rank 0 where the run has no end."""
    remarks: Sequence[str]
    """What could not be read."""


def read_run(folder: Path) -> RunFacts:
    """Raises InputError where there is no run folder."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder: give a run folder, e.g. runs/first-run")
    if not any((folder / name).exists() for name in ("job.toml", "metrics.jsonl", "exit.json")):
        raise InputError(f"{folder} is no run folder: it has no job.toml; give the one that holds job.toml and metrics.jsonl")
    remarks: list[str] = []
    table = partial(_json, folder, kind=dict, remarks=remarks)
    result, exit_, diagnosis = table("result.json"), table("exit.json"), table("diagnosis.json")
    metrics = _with_result(read_metrics(folder / "metrics.jsonl", remarks), result)
    job, job_text = _job(folder / "job.toml", remarks)
    ranks = _json(folder, "environment.json", list, remarks)
    return RunFacts(
        folder=folder,
        metrics=metrics,
        job=job,
        job_text=job_text,
        result=result,
        exit=exit_,
        diagnosis=diagnosis,
        environment=[{str(key): str(value) for key, value in rank.items()} for rank in ranks if isinstance(rank, dict)],
        board=read_rows(_json(folder, BOARD_FILE, list, remarks)),
        logs={} if result.get("reason") == "done" else _logs(folder / "logs", _failed_ranks(exit_, diagnosis)),
        remarks=remarks,
    )


def read_metrics(path: Path, remarks: list[str]) -> Metrics:
    """Sorts the lines; adds a remark for those that are no events."""
    lines = _text(path, remarks).splitlines()
    events = [event for line in lines if (event := _event(line)) is not None]
    if len(events) < len(lines):
        remarks.append(f"metrics.jsonl: {len(lines) - len(events)} of {len(lines)} lines cannot be read")
    checkpoints = [event for event in events if "checkpoint" in event]
    rest = [_numbers(event) for event in events if "checkpoint" not in event and "slow_rank" not in event]
    records = [numbers for numbers in rest if "loss" in numbers]
    evaluations = [numbers for numbers in rest if "loss" not in numbers and numbers.keys() - _RECORD]
    return Metrics(_in_order(records), _in_order(evaluations), sorted(checkpoints, key=lambda event: event["step"]))


def clean(text: str) -> str:
    """Without colours and control characters, which a page cannot hold."""
    return _CONTROL.sub("", text)


def last_lines(path: Path) -> list[str]:
    """At most _LOG_LINES, and of no more than the last _LOG_BYTES."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return clean(text.replace("\r", "\n")).splitlines()[-_LOG_LINES:]


def _event(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _is_step(found.get("step")) else None


def _is_step(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15


def _numbers(event: Mapping[str, Any]) -> Numbers:
    """NaN stands for what no chart can show: infinity, null, an integer beyond all floats."""
    return {name: _finite(value) for name, value in event.items() if value is None or type(value) in (int, float)}


def _finite(value: Any) -> float:
    known = value is not None and abs(value) < _LARGEST
    return value if known else math.nan


def _in_order(events: Iterable[Numbers]) -> list[Numbers]:
    """By step; of two at one step, the later line."""
    return [event for _, event in sorted({event["step"]: event for event in events}.items())]


def _with_result(metrics: Metrics, result: Mapping[str, Any]) -> Metrics:
    """result.json has the final evaluation too: take it from there where metrics.jsonl does not end with it."""
    final = {name: value for name, value in _numbers(result).items() if name.startswith(_EVALUATED)}
    steps = result.get("steps")
    if not final or not _is_step(steps) or any(event["step"] == steps for event in metrics.evaluations):
        return metrics
    return Metrics(metrics.records, _in_order([*metrics.evaluations, {"step": steps, **final}]), metrics.checkpoints)


def _job(path: Path, remarks: list[str]) -> tuple[dict[str, Any], str]:
    """The table and its text, without the values of [env]."""
    try:
        job = tomllib.loads(_text(path, remarks))
    except (ValueError, RecursionError) as error:
        remarks.append(f"{path.name} cannot be read: {error}")
        return {}, ""
    if isinstance(job.get("env"), dict):
        job["env"] = dict.fromkeys(job["env"], "(not shown)")
    return job, tomli_w.dumps(job)


def _failed_ranks(exit_: Mapping[str, Any], diagnosis: Mapping[str, Any]) -> Iterator[int]:
    """The first cause first."""
    late = diagnosis.get("late")
    for rank in (exit_.get("rank"), *(late if isinstance(late, list) else ())):
        if _is_step(rank):
            yield rank


def _logs(folder: Path, ranks: Iterable[int]) -> dict[int, list[str]]:
    wanted = list(dict.fromkeys(ranks)) or [0]
    found = {rank: last_lines(folder / f"rank-{rank:05d}.log") for rank in wanted[:_LOGS]}
    return {rank: lines for rank, lines in found.items() if lines}


def _json(folder: Path, name: str, kind: type[T], remarks: list[str]) -> T:
    """The file's content, or an empty one of its kind."""
    text = _text(folder / name, remarks)
    if not text:
        return kind()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        remarks.append(f"{name} cannot be read: {error}")
        return kind()
    if not isinstance(found, kind):
        remarks.append(f"{name} holds no {kind.__name__}")
        return kind()
    return found


def _text(path: Path, remarks: list[str]) -> str:
    """Empty where there is no file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        remarks.append(f"{path.name} cannot be read: {error.strerror}")
        return ""
