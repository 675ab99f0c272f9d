"""A training step on one CPU core: ours and open_clip_train's, in alternating turns of one run.

Both trainers run as they are, on one batch in memory that comes again and again, so that no image is decoded.
Each side is one process, which waits while the other has its turn; a turn is one step with all that the loop
does about it. The last line on stdout is JSON. Captions have full length: ours are not cut.

Where others use the machine too, `--clock cpu` counts processor time and not the wall's.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from types import TracebackType

import click

GOAL = 1.0
_SIDES = ("ours", "theirs")
_WARM_UP = 2
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


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
        self._log.close()

    def step(self) -> float:
        """Makes one step and returns its seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the next line finds
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            raise SystemExit(f"{self.name} ended with exit code {code}:\n{self._log.read()[-3000:]}")
        return float(line)


@click.command(help=__doc__)
@click.option("--model", default="ViT-B-32", show_default=True, help="A model that open_clip knows.")
@click.option("--samples", default=4, show_default=True, help="Samples of a step.")
@click.option("--pairs", default=9, show_default=True, help="Turns of each side.")
@click.option("--clock", type=click.Choice(["wall", "cpu"]), default="wall", show_default=True)
def main(model: str, samples: int, pairs: int, clock: str) -> None:
    """Run the benchmark."""
    with Side("ours", model, samples, clock) as ours, Side("theirs", model, samples, clock) as theirs:
        turns = in_turns(ours, theirs, pairs)
    print(json.dumps(summary(turns, model, samples)))


def in_turns(ours: Side, theirs: Side, pairs: int) -> list[tuple[float, float]]:
    """Returns the seconds of ours and of theirs in each pair; every second pair begins with the other."""
    for side in (ours, theirs):
        for _ in range(_WARM_UP):
            side.step()
    turns = []
    for number in range(pairs):
        order = (ours, theirs) if number % 2 == 0 else (theirs, ours)
        seconds = {side.name: side.step() for side in order}
        turns.append((seconds["ours"], seconds["theirs"]))
        print(
            f"pair {number + 1}: ours {turns[-1][0]:.3f} s, open_clip_train {turns[-1][1]:.3f} s", flush=True
        )
    return turns


def summary(turns: list[tuple[float, float]], model: str, samples: int) -> dict[str, object]:
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
