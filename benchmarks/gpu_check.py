"""Everything worth knowing of a GPU, the most valuable first: what the kit of `make gpu-kit` runs.

    python -m benchmarks.gpu_check --seconds 780 --out gpu-results

`summary.md` in the folder grows with each part, so that a machine that goes away half way has told the most.
On a null GPU everything runs that needs no results, and the times mean nothing.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click

_LEAST_S = 15
"""A part with less time left is not begun."""


@dataclass(frozen=True)
class Part:
    """One part: a module and its arguments, the seconds that it may take, and the last lines to keep."""

    name: str
    limit_s: int
    command: tuple[str, ...]
    lines: int


def _step(case: str, limit_s: int, steps: int, skip: int) -> Part:
    words = ("benchmarks.gpu", "--cases", case, "--pairs", "1", "--steps", str(steps), "--skip", str(skip))
    return Part(f"step-{case}", limit_s, words, 2)


def parts(null: bool) -> list[Part]:
    """Returns the parts in order."""
    marks = "gpu and not computes" if null else "gpu"
    # Another torch warns of other things than the one that the project pins: no failure here.
    tests = ("pytest", "tests/gpu", "-m", marks, "-q", "-p", "no:cacheprovider", "-rfEs", "-W", "default")
    return [
        Part("machine", 40, ("benchmarks.gpu_machine",), 6),
        _step("B-32", 90, 30, 10),
        Part("profile-B-32", 60, ("benchmarks.gpu_profile", "B-32"), 40),
        _step("L-14", 90, 15, 6),
        _step("SigLIP-B-16", 90, 15, 6),
        _step("B-32-captions", 90, 20, 8),
        _step("B-32-small", 60, 100, 20),
        _step("B-32-small-graphs", 60, 100, 20),
        Part("run", 150, ("benchmarks.gpu_run",), 30),
        Part("tests", 300, tests, 12),
        _step("B-16", 90, 20, 8),
        _step("B-32-accumulated", 90, 10, 4),
        Part("profile-L-14", 60, ("benchmarks.gpu_profile", "L-14"), 40),
        Part("profile-SigLIP-B-16", 60, ("benchmarks.gpu_profile", "SigLIP-B-16"), 40),
    ]


@click.command(help=__doc__)
@click.option("--seconds", default=780, show_default=True, help="Seconds that all parts may take together.")
@click.option("--out", default="gpu-results", show_default=True, type=click.Path(path_type=Path))
@click.option("--only", default="", help="Names of parts, with commas between.")
def main(seconds: int, out: Path, only: str) -> None:
    """Run the parts."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    wanted = set(only.split(",")) - {""}
    failed = []
    with (out / "summary.md").open("w") as summary:
        for part in parts("NULLGPU_LIBRARY" in os.environ):
            left = seconds - (time.monotonic() - began)
            if wanted and part.name not in wanted:
                continue
            if left < _LEAST_S:
                text = f"## {part.name}: no time was left\n"
            else:
                code, text = run(part, min(part.limit_s, left), out)
                failed += [part.name] if code != 0 else []
            print(text, flush=True)
            summary.write(text + "\n")
            summary.flush()
    raise SystemExit(f"failed or not over: {', '.join(failed)}" if failed else 0)


def run(part: Part, limit_s: float, out: Path) -> tuple[int | None, str]:
    """Runs a part with its output in a log; returns its exit code, None past the limit, and its summary."""
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
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    lines = log.read_text(errors="replace").splitlines()[-part.lines :]
    how = "past its limit" if code is None else f"exit code {code}"
    took = f"## {part.name}: {how} after {time.monotonic() - began:.0f} s"
    return code, "\n".join([took, "```", *(line[:300] for line in lines), "```", ""])


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
