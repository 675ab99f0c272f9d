"""Some steps under the magnifying glass: torch's profiler on every rank, Horovod's own timeline. Chrome traces, for ui.perfetto.dev."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from trainer.comm.protocol import Comm

FOLDER = "traces"
log = logging.getLogger("clipship")


class Trace:
    """On each rank. `begin` and `end` stand around each step, and do nothing outside of the window."""

    def __init__(self, window: tuple[int, int] | None, folder: Path, comm: Comm) -> None:
        """`window`: its first and last step, both inside; `folder`: the run's."""
        self._first, self._last = window or (1, 0)
        self._folder, self._comm = folder / FOLDER, comm
        self._profile: profile | None = None
        self._path = Path()

    def begin(self, step: int) -> None:
        """Start to record, where the window begins, or goes on after a resume."""
        if self._profile is not None or not self._first <= step <= self._last:
            return
        try:
            self._folder.mkdir(exist_ok=True)
        except OSError as error:  # a full disk ends no run
            log.warning("%-12s NOT WRITTEN: %s", "trace", error)
            self._last = 0
            return
        self._path = self._folder / f"rank-{self._comm.world.rank:05d}-steps-{step}-{self._last}.json"
        self._comm.start_timeline(self._path.with_name(f"{self._comm.name}-{self._path.name}"))
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (self._comm.device.type == "cuda")]
        self._profile = profile(activities=activities)
        self._profile.start()

    def end(self, step: int) -> None:
        """Write what was recorded, after the window's last step."""
        if step >= self._last:
            self.close()

    def close(self) -> None:
        """Write what was recorded so far: the run stops within the window."""
        if self._profile is None:
            return
        if self._comm.device.type == "cuda":
            torch.cuda.synchronize(self._comm.device)
        self._profile.stop()
        self._comm.stop_timeline()
        try:
            self._profile.export_chrome_trace(str(self._path))
            log.info("%-12s %s", "trace", self._path)
        except (OSError, RuntimeError) as error:  # a full disk ends no run
            log.warning("%-12s NOT WRITTEN: %s", "trace", error)
        self._profile, self._last = None, 0
