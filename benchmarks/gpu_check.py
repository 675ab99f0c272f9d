"""Everything worth knowing of a GPU, the most valuable first: what the kit of `make gpu-kit` runs.

    python -m benchmarks.gpu_check --seconds 3600 --out gpu-results

`summary.md` in the folder has one row for each part, and JSON in its last line. It is written anew after each
part, so that a machine that goes away half way has told the most. On a null GPU everything runs that needs no
results, and the times mean nothing.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.gpu_cases import CASES, GROUPS

_LEAST_S = 15
"""A part with less time left is not begun."""
_PROFILED = ("B-32", "L-14", "SigLIP-B-16")
_ERROR = re.compile(r"[\w.]*Error\b")
"""A line of a traceback that says what failed."""
_LONGEST = 300
"""Characters of a result."""


@dataclass(frozen=True)
class Part:
    """One part: a module and its arguments, and the seconds that it may take."""

    name: str
    limit_s: int
    command: tuple[str, ...]
    least_gpus: int = 1


@dataclass(frozen=True)
class Row:
    """Result of a part. The text is the last line that it printed, but for JSON."""

    name: str
    end: str
    text: str
    seconds: float = 0.0
    found: Mapping[str, Any] = field(default_factory=dict)
    """The JSON in its last line; of a step, the case's measurements."""


def _steps(group: str) -> list[Part]:
    return [
        Part(
            name,
            case.limit_s,
            (
                *("benchmarks.gpu", "--cases", name, "--pairs", "1"),
                *("--steps", str(case.steps), "--skip", str(case.skip)),
            ),
            2 if case.backend else 1,
        )
        for name, case in GROUPS[group].items()
    ]


def parts(null: bool) -> list[Part]:
    """Returns the parts in order; a null GPU has a processor that is slow at pictures."""
    marks = "gpu and not computes" if null else "gpu"
    # Another torch warns of other things than the one that the project pins: no failure here.
    tests = ("pytest", "tests/gpu", "-m", marks, "-q", "-p", "no:cacheprovider", "-rfEs", "-W", "default")
    pictures = ("256", "32") if null else ()
    return [
        Part("machine", 40, ("benchmarks.gpu_machine",)),
        *_steps("whole"),
        *_steps("blocks"),
        *_steps("small"),
        Part("nccl", 60, ("benchmarks.gpu_nccl",), least_gpus=2),
        *_steps("ranks"),
        Part("run", 240, ("benchmarks.gpu_run", *pictures)),
        *_steps("attention"),
        *_steps("packed"),
        Part("jpeg", 180, ("benchmarks.gpu_jpeg",)),
        Part("tests", 300, tests),
        *_steps("more"),
        *(Part(f"profile-{name}", 90, ("benchmarks.gpu_profile", name)) for name in _PROFILED),
    ]


@click.command(help=__doc__)
@click.option("--seconds", default=3600, show_default=True, help="Seconds that all parts may take together.")
@click.option("--out", default="gpu-results", show_default=True, type=click.Path(path_type=Path))
@click.option("--only", default="", help="Names of parts, with commas between.")
@click.option("--slower", default=1.0, show_default=True, help="Factor of each part's limit.")
def main(seconds: int, out: Path, only: str, slower: float) -> None:
    """Run the parts."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    wanted, gpus = set(only.split(",")) - {""}, max(1, torch.cuda.device_count())
    rows: dict[str, Row] = {}
    null = "NULLGPU_LIBRARY" in os.environ
    for part in parts(null):
        if wanted and part.name not in wanted:
            continue
        left = seconds - (time.monotonic() - began)
        if gpus < part.least_gpus:
            row = Row(part.name, "not tried", f"it needs {part.least_gpus} GPUs")
        elif left < _LEAST_S:
            row = Row(part.name, "not tried", "no time left")
        else:
            row = compared(run(part, min(slower * part.limit_s, left), out), rows)
        rows[row.name] = row
        print(_line(row), flush=True)
        _write(out / "summary.md", summary(list(rows.values()), null))
    failed = [row.name for row in rows.values() if row.end not in ("done", "not tried")]
    raise SystemExit(f"failed or not over: {', '.join(failed)}" if failed else 0)


def summary(rows: Sequence[Row], null: bool) -> str:
    """Returns the table, and JSON in the last line; on a null GPU no time means anything."""
    table = ["| part | end | seconds | result |", "|---|---|---|---|", *map(_line, rows)]
    results = {row.name: {key: value for key, value in asdict(row).items() if key != "name"} for row in rows}
    last = json.dumps({"benchmark": "gpu-kit", "times_mean_nothing": null, "parts": results})
    return "\n".join([*table, "", last, ""])


def _line(row: Row) -> str:
    return f"| {row.name} | {row.end} | {row.seconds:.0f} | {row.text.replace('|', '/')} |"


def _write(path: Path, text: str) -> None:
    beside = path.with_suffix(".part")
    beside.write_text(text)
    beside.replace(path)


def compared(row: Row, rows: Mapping[str, Row]) -> Row:
    """Returns the row of a step with its speed as a share of that of the case that it is measured against."""
    case = CASES.get(row.name)
    base = rows.get(case.against) if case is not None else None
    if base is None or not {"ours_samples_s"} <= row.found.keys() & base.found.keys():
        return row
    share = row.found["ours_samples_s"] / base.found["ours_samples_s"]
    text = f"{share:.3f} times the speed of {base.name}: {row.text}"
    return replace(row, text=text, found={**row.found, "share": share})


def run(part: Part, limit_s: float, out: Path) -> Row:
    """Runs a part with its output in a log."""
    log, began = out / f"{part.name}.log", time.monotonic()
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CLIPSHIP_RESULTS": str(out),
    }
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *part.command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            end = {0: "done"}.get(code := process.wait(limit_s), f"failed ({code})")
        except subprocess.TimeoutExpired:
            end = f"over {limit_s:.0f} s"
        finally:
            _end(process)
    return _row(part, end, time.monotonic() - began, log.read_text(errors="replace"))


def _row(part: Part, end: str, seconds: float, printed: str) -> Row:
    lines = ["", *filter(None, map(str.strip, printed.splitlines()))]
    found: dict[str, Any] = {}
    if end == "done" and lines[-1].startswith("{"):
        found = json.loads(lines.pop())
        found = found.get("cases", {}).get(part.name, found)
        end = "not tried" if "skipped" in found else end
    last = next(filter(_ERROR.match, reversed(lines)), lines[-1]) if end != "done" else lines[-1]
    text = found.get("skipped") or last.removeprefix(part.name).strip()
    return Row(part.name, end, text[:_LONGEST], seconds, found)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the processes of a part. Supervisors of a run have other sessions, and end with their parent."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(5)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    main()
