"""goodput.jsonl: when each start and generation of a run began and ended, and what its time went into.

Lines are only added, and none is ever removed: `metrics.jsonl` forgets the steps that a later generation does
again, and `restarts.json` the restarts of an earlier start. Rank 0 adds `begin`, `steps`, `evaluation`,
`save` and `close`; the supervisors add `restart` and `end`. `trainer.telemetry.goodput` computes from them.
Imports no torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.run.layout import GOODPUT_FILE
from trainer.safe_io.atomic import json_text
from trainer.safe_io.plain import MOST_LINES_BYTES, append_line, parse_json, read_plain

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
    """Returns the lines in their order; empty without a file. Lines that are no events are left out."""
    try:
        lines = read_plain(run_folder / GOODPUT_FILE, most=MOST_LINES_BYTES, errors="replace").splitlines()
    except OSError:
        return []
    events = (_event(line) for line in lines)
    return [event for event in events if event is not None]


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = parse_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
