"""Measures what a person waits for, ours against open_clip_train on the same job: `make bench-start`.

The job is the preset `laptop`: ViT-S-32-alt on made-up pictures, two ranks on the CPU. Four times are taken,
in alternating turns, from what each side prints: from the command to its first line, to its first step, from
its last step to its end, and from Ctrl-C to its answer, which is the first line after it that is no step's,
or its end; torchrun's agent answers within a millisecond, too. The last line on stdout is JSON: medians in
seconds and ratios, theirs / ours.
"""

import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import click

from benchmarks.data import their_python
from benchmarks.environment import CACHE

GOALS = {"first_line": 0.3, "first_step": 8.0, "done": 3.0, "ctrl_c": 0.3}
"""Seconds of ours, on two idle cores."""
_STEPS, _BATCH, _RANKS = 20, 32, 2
_EPOCH = "Train Epoch: "
"""Begins open_clip_train's line of a step."""
_LIMIT_S = 300.0
_RESOLUTION_S = 0.01
"""A shorter time counts as this in a ratio."""


class Watched:
    """A command whose lines are stamped with the time of their arrival."""

    def __init__(self, command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
        self.started = time.monotonic()
        self.ended: float | None = None
        self.lines: list[tuple[float, str]] = []
        self._changed = threading.Condition()
        self._mark = f"CLIPSHIP_BENCHMARK={secrets.token_hex(8)}"
        name, _, value = self._mark.partition("=")
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**variables, name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with self._changed:
                    self.lines.append((time.monotonic(), line.decode(errors="replace").rstrip()))
                    self._changed.notify()
        self._process.wait()
        with self._changed:
            self.ended = time.monotonic()
            self._changed.notify()

    def wait(self, found: Callable[[], bool]) -> None:
        """Waits until that holds.

        Raises:
            SystemExit: It did not within five minutes, or the command ended before.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: found() or self.ended is not None, _LIMIT_S) or not found():
                shown = "\n".join(line for _, line in self.lines[-30:])
                raise SystemExit(f"{self._process.args!r} did not go as expected:\n{shown}")

    def kill(self) -> None:
        """Ends what may be left of it, in other sessions too: torchrun gives each rank its own."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)

    def press_ctrl_c(self) -> float:
        """Sends SIGINT to all its processes, as a terminal does; returns the time of it."""
        os.killpg(self._process.pid, signal.SIGINT)
        return time.monotonic()

    def has_ended(self) -> bool:
        """Returns whether the command and all that wrote into its output have ended."""
        return self.ended is not None


class Side:
    """One of the two trainers: its command for a folder, and how its line of a step looks."""

    def __init__(
        self,
        name: str,
        command: Callable[[Path], Sequence[str]],
        step_line: str,
        variables: Mapping[str, str],
    ) -> None:
        self.name, self._command, self._variables = name, command, variables
        self._step_line = re.compile(step_line)

    def whole_run(self) -> dict[str, float]:
        """Returns the seconds to the first line, to the first step, and from the last step to the end."""
        with self._started() as run:
            run.wait(run.has_ended)
            steps = self._steps(run)
            if len(steps) < _STEPS or run.ended is None:
                shown = "\n".join(line for _, line in run.lines[-30:])
                raise SystemExit(f"{self.name} printed {len(steps)} steps:\n{shown}")
            return {
                "first_line": run.lines[0][0] - run.started,
                "first_step": steps[0] - run.started,
                "done": run.ended - steps[-1],
            }

    def ctrl_c(self) -> dict[str, float]:
        """Returns the seconds from Ctrl-C after the third step to the answer."""
        with self._started() as run:
            run.wait(lambda: len(self._steps(run)) >= 3)
            pressed = run.press_ctrl_c()
            run.wait(run.has_ended)
            answers = [at for at, line in run.lines if at > pressed and not self._step_line.search(line)]
            return {"ctrl_c": min([*answers, run.ended or pressed]) - pressed}

    @contextlib.contextmanager
    def _started(self) -> Iterator[Watched]:
        with tempfile.TemporaryDirectory() as folder:
            run = Watched(self._command(Path(folder)), Path(folder), self._variables)
            try:
                yield run
            finally:
                run.kill()

    def _steps(self, run: Watched) -> list[float]:
        return [at for at, line in run.lines if self._step_line.search(line)]


def ours(steps: int) -> Side:
    """`clipship run` of the preset, in its folder."""
    python = [sys.executable, "-P", "-m", "trainer.cli"]
    preset = Path(__file__).parents[1] / "trainer" / "presets" / "laptop.toml"

    def command(folder: Path) -> Sequence[str]:
        (folder / "job.toml").write_text(preset.read_text())
        settings = ["--nproc", str(_RANKS), "--set", f"optim.steps={steps}"]
        return [*python, "run", "job.toml", *settings]

    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return Side("ours", command, r"^step +\d+/", variables)


def theirs(steps: int) -> Side:
    """open_clip_train on two ranks of torchrun; it saves after its epoch, which is as long as the job."""
    python = their_python(CACHE)
    trainer = Path(__file__).with_name("goodput_open_clip.py")
    model = Path(str(files("open_clip"))) / "model_configs" / "ViT-S-32-alt.json"
    agent = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={_RANKS}"]
    arguments = [
        "--dataset-type", "synthetic", "--batch-size", str(_BATCH // _RANKS),
        "--train-num-samples", str(steps * _BATCH), "--epochs", "1", "--workers", "1", "--lr", "1e-4",
        "--warmup", "5", "--precision", "fp32", "--device", "cpu", "--dist-backend", "gloo",
        "--local-loss", "--gather-with-grad", "--log-every-n-steps", "1",
    ]  # fmt: skip
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables = {**inherited, "CUDA_VISIBLE_DEVICES": "", "OPEN_CLIP_ARGUMENTS": shlex.join(arguments)}
    return Side("theirs", lambda _: [str(python), *agent, str(trainer), str(model)], _EPOCH, variables)


@click.command(help=__doc__)
@click.option("--turns", default=3, show_default=True, help="Turns of each side; the first warms files up.")
def main(turns: int) -> None:
    """Run the benchmark."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what it started ends, too
    found: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    for turn in range(turns + 1):
        for whole, endless in ((ours(_STEPS), ours(10_000)), (theirs(_STEPS), theirs(10_000))):
            seconds = whole.whole_run() | endless.ctrl_c()
            shown = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
            print(f"turn {turn}, {whole.name}: {shown}", flush=True)
            if turn:
                found[whole.name].append(seconds)
    medians = {
        side: {name: statistics.median(each[name] for each in turns_of) for name in GOALS}
        for side, turns_of in found.items()
    }
    print(json.dumps(summary(medians["ours"], medians["theirs"]) | {"turns": turns}))


def summary(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, object]:
    """Returns the seconds of both, the goals of ours and the ratios, theirs / ours."""
    times = {
        f"{side}_{name}_s": round(seconds[name], 3)
        for side, seconds in (("ours", ours), ("theirs", theirs))
        for name in GOALS
    }
    ratios = {
        f"ratio_{name}": round(max(theirs[name], _RESOLUTION_S) / max(ours[name], _RESOLUTION_S), 2)
        for name in GOALS
    }
    return {"benchmark": "start", **times, **ratios, "goals_s": GOALS}


if __name__ == "__main__":
    main()
