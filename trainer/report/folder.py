"""Reads a run folder in any state: unfinished, failed, half written or empty. No torch.

No content of a file raises an error here: a file that cannot be read becomes a remark, so that the rest is
still shown.
"""

import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import tomli_w

from trainer.config.results import EMA, MIX
from trainer.errors import InputError
from trainer.report.board import BOARD_FILE, BoardRow, read_rows
from trainer.report.suites import SuiteBars, listed, suite_bars
from trainer.run import goodput_log
from trainer.run.layout import (
    COPIES_FILE,
    DIAGNOSIS_FILE,
    ENVIRONMENT_FILE,
    EVALUATIONS,
    EXIT_FILE,
    JOB_FILE,
    LOGS,
    METRICS_FILE,
    RESTARTS_FILE,
    RESULT_FILE,
    rank_log,
)
from trainer.safe_io.plain import (
    MOST_BYTES,
    MOST_LINES_BYTES,
    last_text,
    lines_from_end,
    parse_json,
    read_plain,
)
from trainer.telemetry.goodput import GenerationTimes, generations
from trainer.telemetry.records import SO_FAR, Record
from trainer.text.masking import masked, masked_values

T = TypeVar("T")
Numbers = Mapping[str, float]

_RECORD = {each.name for each in fields(Record)}
_ABOUT_LINES = {"generation"}
"""Fields that every line of metrics.jsonl has beside its step; they are no results of an evaluation."""
_EVALUATED = ("zero_shot_", "retrieval_", EMA, MIX)
"""Prefixes of the names of evaluation metrics; result.json has other numbers beside them."""
_LARGEST = 1e300
_RECENT = 64
_LOG_LINES = 40
_LOG_BYTES = 64 * 1024
_LOGS = 8
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\t\n\x20-\x7e\x80-\U0010ffff]")


@dataclass(frozen=True)
class Metrics:
    """Lines of metrics.jsonl, sorted by kind."""

    records: Sequence[Numbers] = ()
    """Records of the training loop in the order of their steps, with fields of `telemetry.Record`."""
    evaluations: Sequence[Numbers] = ()
    """Evaluations: `step` and the metrics."""
    checkpoints: Sequence[Mapping[str, Any]] = ()
    """Checkpoints: `step`, `checkpoint`, and its cost."""
    so_far: Numbers = field(default_factory=dict)
    """Sums over all records of the run, which the last one has; empty if it has none."""

    def total(self, name: str) -> float:
        """Returns the sum of a figure over all records, also where only the last ones were read."""
        known = self.so_far.get(name)
        return sum(record.get(name, 0) for record in self.records) if known is None else known


@dataclass(frozen=True)
class RunFacts:
    """Contents of a run folder. A missing file is an empty value."""

    folder: Path
    metrics: Metrics
    job: Mapping[str, Any]
    job_text: str
    """The job as TOML; the values of [env], which may be secrets, are left out."""
    result: Mapping[str, Any]
    exit: Mapping[str, Any]
    """First cause of the run's end; see `trainer.run.exit_record.ExitRecord`."""
    diagnosis: Mapping[str, Any]
    environment: Sequence[Mapping[str, str]]
    """Environment of each rank."""
    board: Sequence[BoardRow]
    logs: Mapping[int, Sequence[str]]
    """Last lines by rank: of the ranks that failed, or of rank 0 if the run has no end."""
    remarks: Sequence[str]
    """Names of files that could not be read, with the reasons."""
    restarts: Sequence[Mapping[str, Any]] = ()
    """Restarts of the ranks in the last start; see `trainer.supervise.restarts.Restart`."""
    times: Sequence[GenerationTimes] = ()
    """Times of all generations in all starts of the run."""
    copies: Mapping[str, Any] = field(default_factory=dict)
    """Last step that is copied and what is not; empty if nothing is. See `trainer.copies.copier`."""
    suites: Sequence[SuiteBars] = ()
    """Results of `clipship eval --suite`."""


def has_started(folder: Path) -> bool:
    """Returns whether a rank of the run has started: before that, a submitted run has its artefacts alone."""
    return any((folder / name).exists() for name in (JOB_FILE, METRICS_FILE, EXIT_FILE))


def read_run(folder: Path, *, recent: bool = False) -> RunFacts:
    """Reads a run folder; with `recent`, of its records the last _RECENT. Raises InputError if it is none."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give a run folder, e.g. runs/first-run")
    if not has_started(folder):
        raise InputError(
            f"{folder} is not a run folder: it has no job.toml; give the one that has job.toml and "
            "metrics.jsonl"
        )
    remarks: list[str] = []
    table = partial(_json, folder, kind=dict, remarks=remarks)
    result, exit_, diagnosis = table(RESULT_FILE), table(EXIT_FILE), table(DIAGNOSIS_FILE)
    metrics = _with_result(read_metrics(folder / METRICS_FILE, remarks, recent=recent), result)
    job, job_text = _job(folder / JOB_FILE, remarks)
    ranks = _json(folder, ENVIRONMENT_FILE, list, remarks)
    return RunFacts(
        folder=folder,
        metrics=metrics,
        job=job,
        job_text=job_text,
        result=result,
        exit=exit_,
        diagnosis=diagnosis,
        environment=[
            {str(key): str(value) for key, value in rank.items()} for rank in ranks if isinstance(rank, dict)
        ],
        board=read_rows(_json(folder, BOARD_FILE, list, remarks)),
        logs={} if result.get("reason") == "done" else _logs(folder / LOGS, _failed_ranks(exit_, diagnosis)),
        remarks=remarks,
        restarts=_restarts(table(RESTARTS_FILE)),
        copies=table(COPIES_FILE),
        times=generations(goodput_log.read(folder)),
        suites=suite_bars(_suite_files(folder, remarks)),
    )


def _suite_files(folder: Path, remarks: list[str]) -> Iterator[dict[str, Any]]:
    for path in sorted((folder / EVALUATIONS).glob("*.json")):
        yield _json(path.parent, path.name, dict, remarks)


def _restarts(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [each for each in listed(record, "restarts") if isinstance(each, dict)]


def read_job(folder: Path) -> Mapping[str, Any]:
    """Returns the job of a run folder as a table, without the values of [env]; empty if it has none."""
    return _job(folder / JOB_FILE, [])[0]


def read_metrics(path: Path, remarks: list[str], *, recent: bool = False) -> Metrics:
    """Sorts the lines of metrics.jsonl by kind; adds a remark about lines that are no events.

    With `recent`, only the last records are looked at if they tell the sums over all.
    """
    lines = (recent and _last_records(path)) or _text(path, remarks, MOST_LINES_BYTES).splitlines()
    events = [event for line in lines if (event := _event(line)) is not None]
    if len(events) < len(lines):
        remarks.append(f"metrics.jsonl: {len(lines) - len(events)} of {len(lines)} lines cannot be read")
    checkpoints = [event for event in events if "checkpoint" in event]
    rest = [_numbers(event) for event in events if "checkpoint" not in event and "slow_rank" not in event]
    records = [numbers for numbers in rest if "loss" in numbers]
    others = [
        {name: value for name, value in numbers.items() if name not in _ABOUT_LINES}
        for numbers in rest
        if "loss" not in numbers
    ]
    evaluations = [numbers for numbers in others if numbers.keys() - _RECORD]
    so_far = next((event.get(SO_FAR) for event in reversed(events) if "loss" in event), None)
    return Metrics(
        _in_order(records),
        _in_order(evaluations),
        sorted(checkpoints, key=lambda event: event["step"]),
        _numbers(so_far) if isinstance(so_far, dict) else {},
    )


def _last_records(path: Path) -> list[str]:
    """Returns the lines from the last evaluation and the last records on; none if these tell no sums."""
    lines: list[bytes] = []
    records, evaluated = 0, False
    with suppress(OSError):
        for _, line in lines_from_end(path) if path.stat().st_size <= MOST_LINES_BYTES else ():
            is_record = b'"loss"' in line
            if not is_record or records < _RECENT:
                lines.append(line)
            if is_record and not records and f'"{SO_FAR}"'.encode() not in line:
                return []
            records += is_record
            evaluated |= not is_record and b'"checkpoint"' not in line and b'"slow_rank"' not in line
            if records >= _RECENT and evaluated:
                break
    return [line.decode(errors="replace") for line in reversed(lines)] if records else []


def clean(text: str) -> str:
    """Returns the text without colours, secrets and control characters, which a page cannot hold."""
    return _CONTROL.sub("", masked(text))


def last_lines(path: Path) -> list[str]:
    """Returns at most the last _LOG_LINES lines, from at most the last _LOG_BYTES bytes."""
    try:
        text = last_text(path, _LOG_BYTES)
    except OSError:
        return []
    return clean(text.replace("\r", "\n")).splitlines()[-_LOG_LINES:]


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = parse_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and _is_step(event.get("step")) else None


def _is_step(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15


def _numbers(event: Mapping[str, Any]) -> Numbers:
    """Returns the event's numbers; NaN stands for what no chart can show.

    No chart shows infinity, null, or an integer beyond all floats.
    """
    return {
        name: _finite(value) for name, value in event.items() if value is None or type(value) in (int, float)
    }


def _finite(value: Any) -> float:
    known = value is not None and abs(value) < _LARGEST
    return value if known else math.nan


def _in_order(events: Iterable[Numbers]) -> list[Numbers]:
    """Returns the events by step; of two at one step, the later line."""
    return [event for _, event in sorted({event["step"]: event for event in events}.items())]


def _with_result(metrics: Metrics, result: Mapping[str, Any]) -> Metrics:
    """Adds the final evaluation from result.json, if metrics.jsonl does not end with it."""
    final = {name: value for name, value in _numbers(result).items() if name.startswith(_EVALUATED)}
    steps = result.get("steps")
    if not final or not _is_step(steps) or any(event["step"] == steps for event in metrics.evaluations):
        return metrics
    return replace(metrics, evaluations=_in_order([*metrics.evaluations, {"step": steps, **final}]))


def _job(path: Path, remarks: list[str]) -> tuple[dict[str, Any], str]:
    """Returns the job's table and its text, without the values of [env]."""
    try:
        job = tomllib.loads(_text(path, remarks))
    except (ValueError, RecursionError) as error:
        remarks.append(f"{path.name} cannot be read: {error}")
        return {}, ""
    if isinstance(job.get("env"), dict):
        job["env"] = dict.fromkeys(job["env"], "(not shown)")
    job = masked_values(job)
    return job, tomli_w.dumps(job)


def _failed_ranks(exit_: Mapping[str, Any], diagnosis: Mapping[str, Any]) -> Iterator[int]:
    """Yields the failed ranks, that of the first cause first."""
    for rank in (exit_.get("rank"), *listed(diagnosis, "late")):
        if _is_step(rank):
            yield rank


def _logs(folder: Path, ranks: Iterable[int]) -> dict[int, list[str]]:
    wanted = list(dict.fromkeys(ranks)) or [0]
    logs = {rank: last_lines(folder / rank_log(rank)) for rank in wanted[:_LOGS]}
    return {rank: lines for rank, lines in logs.items() if lines}


def _json(folder: Path, name: str, kind: type[T], remarks: list[str]) -> T:
    """Returns the file's content, or an empty value of its type."""
    text = _text(folder / name, remarks)
    if not text:
        return kind()
    try:
        content = parse_json(text)
    except ValueError as error:
        remarks.append(f"{name} cannot be read: {error}")
        return kind()
    if not isinstance(content, kind):
        remarks.append(f"{name} is not a JSON {'object' if kind is dict else 'list'}")
        return kind()
    return content


def _text(path: Path, remarks: list[str], most: int = MOST_BYTES) -> str:
    """Returns the file's text; empty if there is no file."""
    try:
        return read_plain(path, most=most, errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        remarks.append(f"{path.name} cannot be read: {error.strerror}")
        return ""
