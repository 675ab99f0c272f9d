"""One side of `make bench-step`: `python -m benchmarks.step_side ours|theirs MODEL SAMPLES wall|cpu`.

It trains in fp32 on the CPU. Each line on stdin asks for one step, and its seconds are printed on stdout.
"""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.gpu_cases import GpuCase
from benchmarks.gpu_side import ours, theirs

_STEPS = 10_000
"""Length of the run; nobody waits for its end."""


class Turns:
    """Holds the trainer between two steps until the next one is asked for."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wait()
        register_optimizer_step_post_hook(self._step_done)

    def _step_done(self, *_: object) -> None:
        print(self._clock() - self._began, file=sys.__stdout__, flush=True)
        self._wait()

    def _wait(self) -> None:
        if not sys.stdin.readline():
            os._exit(0)
        self._began = self._clock()


def main(arguments: list[str]) -> None:
    """Trains until stdin ends."""
    side, model, samples, clock = arguments
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        Turns({"wall": time.perf_counter, "cpu": time.process_time}[clock])
        run = {"ours": ours, "theirs": theirs}[side]
        run(GpuCase(model, int(samples), precision="fp32"), int(samples), _STEPS, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
