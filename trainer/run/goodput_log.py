"""goodput.jsonl: when each start and generation of a run began and ended, and what its time went into.

Lines are only added, and none is ever removed: `metrics.jsonl` forgets the steps that a later generation does
again, and `restarts.json` the restarts of an earlier start. Rank 0 adds `begin`, `steps`, `evaluation`,
`save` and `close`; the supervisors add `restart` and `end`. `trainer.telemetry.goodput` computes from them.
Imports no torch.
"""

from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.run.layout import GOODPUT_FILE
from trainer.safe_io.atomic import json_text
from trainer.safe_io.plain import MOST_LINES_BYTES, append_line, parse_json, read_lines

SO_FAR = "so_far"
"""Name of a table in each `steps` line: the sums of SUMMED since the generation began."""
SUMMED = ("steps", "seconds", "data_s", "checkpoint_s", "straggler_s")
_STEPS = b'"event": "steps"'
BEGAN = "CLIPSHIP_BEGAN"
"""Variable with the time at which this start began, in seconds since the epoch.

The program that starts the supervisors sets it: `clipship run` to the time of the command, Slurm's script to
that of the allocation, the launcher pod to that of the first worker's answer. A supervisor that was not told
sets the time of its own begin.
"""


def began(env: Mapping[str, str], otherwise: float) -> float:
    """Returns the time at which this start began, from the environment; `otherwise` if it is not there."""
    try:
        return float(env[BEGAN])
    except (KeyError, ValueError):
        return otherwise


def append(run_folder: Path, event: Mapping[str, Any]) -> None:
    """Adds one line. Raises OSError."""
    append_line(run_folder / GOODPUT_FILE, json_text(event))


def read(run_folder: Path) -> list[dict[str, Any]]:
    """Returns the lines in their order; empty without a file. Lines that are no events are left out.

    One `steps` line stands for those of a generation between two steps at which another began: a long run has
    a million.
    """
    path = run_folder / GOODPUT_FILE
    try:
        if path.stat().st_size > MOST_LINES_BYTES:
            return []
        events = [line if _STEPS in line else _event(line) for line in read_lines(path)]
    except OSError:
        return []
    begins = {at for its in events if isinstance(its, dict) and isinstance(at := its.get("from_step"), int)}
    found: list[dict[str, Any]] = []
    waiting: list[bytes] = []
    for event in (*events, {"event": "begin"}):
        if isinstance(event, bytes):
            waiting.append(event)
        elif event is not None:
            if event["event"] in ("begin", "restart", "end"):
                found += _merged(waiting, begins)
                waiting = []
            found.append(event)
    return found[:-1]


def _merged(lines: list[bytes], begins: set[int]) -> list[dict[str, Any]]:
    """Returns the first and the last of a generation's `steps` lines, and those around each begin.

    Each has the sums since the one before. Lines that tell no sums are returned as they are.
    """

    def event(at: int) -> dict[str, Any]:
        return _event(lines[at]) or {}

    found: list[dict[str, Any]] = []
    try:
        after = {bisect_right(range(len(lines)), step, key=lambda at: event(at)["step"]) for step in begins}
        before = dict.fromkeys(SUMMED, 0.0)
        places = {0, len(lines) - 1, *after, *(place - 1 for place in after)}
        for at in sorted(place for place in places if 0 <= place < len(lines)):
            its = event(at)
            sums = its.pop(SO_FAR)
            found.append({**its, **{name: round(sums[name] - before[name], 6) for name in SUMMED}})
            before = sums
    except (LookupError, TypeError):
        return [its for at in range(len(lines)) if (its := event(at))]
    return found


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = parse_json(line.decode(errors="replace"))
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
