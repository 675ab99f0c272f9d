"""The kernels that take longest in a step of a case of `make bench-gpu`.

    python -m benchmarks.gpu_profile CASE

Where CLIPSHIP_RESULTS names a folder, the trace goes there, for a browser's tracing page.
"""

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_cases import CASES, GpuCase, largest_batch
from benchmarks.gpu_side import ours

TIMED, FIRST, COUNT = 5, 17, 3
"""Steps after which time is taken, the first one in the profile, and how many are."""


class Tracer:
    """Times some steps, profiles the next ones, and leaves the process."""

    def __init__(self, name: str, samples: int) -> None:
        self._name, self._samples, self._done, self._began, self._speed = name, samples, 0, 0.0, ""
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        register_optimizer_step_post_hook(self._step_done)

    def _step_done(self, *_: object) -> None:
        self._done += 1
        if self._done not in (TIMED, FIRST, FIRST + COUNT):
            return
        torch.cuda.synchronize()
        if self._done == FIRST:
            self._speed = self._speed_of((time.perf_counter() - self._began) / (FIRST - TIMED))
            self._profile.start()
        elif self._done == FIRST + COUNT:
            self._profile.stop()
            self._say_kernels()
            os._exit(0)  # what a trainer does at its end is no part of a step
        torch.cuda.reset_peak_memory_stats()
        self._began = time.perf_counter()

    def _speed_of(self, step_s: float) -> str:
        peak = torch.cuda.max_memory_allocated() / 2**30
        return (
            f"{self._name}, {self._samples} samples: {step_s * 1e3:.1f} ms, "
            f"{self._samples / step_s:,.0f} samples/s, peak {peak:.1f} GiB"
        )

    def _say_kernels(self) -> None:
        rows = [row for row in self._profile.key_averages() if str(row.device_type).endswith("CUDA")]
        total = sum(row.self_device_time_total for row in rows)
        for row in sorted(rows, key=lambda row: -row.self_device_time_total)[:35]:
            took = row.self_device_time_total
            self._say(
                f"{took / total:6.1%} {took / COUNT / 1e3:8.3f} ms {row.count / COUNT:6.1f} x {row.key[:110]}"
            )
        if folder := os.environ.get("CLIPSHIP_RESULTS"):
            self._profile.export_chrome_trace(f"{folder}/trace-{self._name}.json.gz")
        self._say(f"{self._speed}; the device works {total / COUNT / 1e3:.1f} ms of a step")

    def _say(self, text: str) -> None:
        print(text, file=sys.__stdout__, flush=True)


def main(name: str) -> None:
    """Run and profile our side of the case."""
    case: GpuCase = CASES[name]
    samples = largest_batch(case, torch.cuda.get_device_properties(0).total_memory)
    Tracer(name, samples)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        ours(case, samples, FIRST + COUNT + 5, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1])
