"""A step on one CPU core, ours and open_clip_train's in alternating turns: `make bench-step`.

Then a step on two ranks, one core each: Horovod's and that of DistributedDataParallel (DDP), in turns, too.

Both trainers run as they are, on one batch in memory that comes again and again, so that no image is decoded.
Each side is one process, which waits while the other has its turn; a turn is one step with all that the loop
does about it. The last line on stdout is JSON. Captions have full length: ours are not cut. The benchmark
takes two minutes on two free cores, and ends if a step takes longer than two.

Where others use the machine too, `--clock cpu` counts processor time and not the wall's.
"""

import contextlib
import importlib.util
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

import click

from benchmarks.step_ranks import LIMIT_S, turns_of

GOAL = 1.0
RANKS_GOAL = 1.05
_SIDES = ("ours", "theirs")
_WARM_UP = 2
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Steps(Protocol):
    """One side of a comparison, which makes a step when it is told to."""

    name: str

    def step(self) -> float:
        """Makes one step and returns its seconds."""


class Side:
    """One trainer in a process of its own, which makes a step when it is told to."""

    def __init__(self, name: str, model: str, samples: int, clock: str) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed at the end of the block
        command = [sys.executable, "-m", "benchmarks.step_side", name, model, str(samples), clock]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **_THREADS, "CUDA_VISIBLE_DEVICES": ""},
        )

    def __enter__(self) -> "Side":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._log.close()

    def step(self) -> float:
        """Makes one step and returns its seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the next line finds
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], LIMIT_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            how = f"ended with exit code {self._process.wait()}" if ready else f"took over {LIMIT_S:g} s"
            self._log.seek(0)
            raise SystemExit(f"{self.name} {how}:\n{self._log.read()[-3000:]}")
        return float(line)


@click.command(help=__doc__)
@click.option("--model", default="ViT-B-32", show_default=True, help="A model that open_clip knows.")
@click.option("--samples", default=4, show_default=True, help="Samples of a step.")
@click.option("--pairs", default=9, show_default=True, help="Turns of each side.")
@click.option("--clock", type=click.Choice(["wall", "cpu"]), default="wall", show_default=True)
@click.option("--ranks-model", default="ViT-S-32", show_default=True, help="Model of the two ranks.")
@click.option("--ranks/--no-ranks", default=True, show_default=True, help="Measure the two ranks, too.")
def main(model: str, samples: int, pairs: int, clock: str, ranks_model: str, ranks: bool) -> None:
    """Run the benchmark."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that stopped ranks end, too
    print(f"starting both trainers with {model} on one core each", flush=True)
    with Side("ours", model, samples, clock) as ours, Side("theirs", model, samples, clock) as theirs:
        turns = in_turns(ours, theirs, pairs)
    of_ranks: Sequence[tuple[float, float]] = []
    if ranks and importlib.util.find_spec("horovod") is None:
        print("Horovod is not installed: its step was not compared with that of DDP")
    elif ranks:
        print(f"starting two ranks with {ranks_model}, of Horovod and of DDP", flush=True)
        of_ranks = turns_of(pairs, ranks_model, samples, in_turns)
    print(json.dumps(summary(turns, model, samples) | summary_of_ranks(of_ranks, ranks_model)))


def in_turns(one: Steps, other: Steps, pairs: int) -> list[tuple[float, float]]:
    """Returns the seconds of both in each pair; every second pair begins with the other."""
    for side in (one, other):
        for _ in range(_WARM_UP):
            side.step()
    turns = []
    for number in range(pairs):
        order = (one, other) if number % 2 == 0 else (other, one)
        seconds = {side.name: side.step() for side in order}
        turns.append((seconds[one.name], seconds[other.name]))
        shown = (f"{side.name} {seconds[side.name]:.3f} s" for side in (one, other))
        print(f"pair {number + 1}: {', '.join(shown)}", flush=True)
    return turns


def summary_of_ranks(turns: Sequence[tuple[float, float]], model: str) -> dict[str, object]:
    """Returns the median of Horovod's seconds divided by DDP's; None if they were not measured."""
    ratio = round(statistics.median(horovod / ddp for horovod, ddp in turns), 3) if turns else None
    return {"horovod_over_ddp": ratio, "horovod_over_ddp_goal": RANKS_GOAL, "ranks_model": model}


def summary(turns: Sequence[tuple[float, float]], model: str, samples: int) -> dict[str, object]:
    """Returns the medians over the pairs; `speed` is theirs divided by ours."""
    return {
        "benchmark": "step",
        "speed": round(statistics.median(theirs / ours for ours, theirs in turns), 3),
        "goal": GOAL,
        "pairs": len(turns),
        "model": model,
        "samples": samples,
        **{
            f"{side}_s": round(statistics.median(pair[number] for pair in turns), 4)
            for number, side in enumerate(_SIDES)
        },
    }


if __name__ == "__main__":
    main()
