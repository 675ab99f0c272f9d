"""Profiles some steps: torch's profiler on every rank, and Horovod's own timeline.

Both are Chrome traces, for ui.perfetto.dev.
"""

import logging
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from trainer.comm.accelerator import on_accelerator, runtime
from trainer.comm.protocol import Comm
from trainer.run.layout import TRACES

log = logging.getLogger("clipship")


class Profiler:
    """Traces a window of steps; every rank has one. `begin` and `end` stand around each step."""

    def __init__(self, window: tuple[int, int] | None, folder: Path, comm: Comm) -> None:
        """`window` holds the first and last step to trace, both included; `folder` is the run folder."""
        self._first, self._last = window or (1, 0)
        self._folder, self._comm = folder / TRACES, comm
        self._profile: profile | None = None
        self._path = Path()

    @property
    def active(self) -> bool:
        """True while a step is recorded."""
        return self._profile is not None

    def begin(self, step: int) -> None:
        """Starts to record at the window's first step, or at a later one after a resume."""
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
        everything = on_accelerator(self._comm.device)
        self._profile = profile(activities=None if everything else [ProfilerActivity.CPU])
        self._profile.start()

    def end(self, step: int) -> None:
        """Writes the trace after the window's last step."""
        if step >= self._last:
            self.close()

    def close(self) -> None:
        """Writes what was recorded so far, if the run stops within the window."""
        if self._profile is None:
            return
        if on_accelerator(self._comm.device):
            runtime(self._comm.device).synchronize(self._comm.device)
        self._profile.stop()
        self._comm.stop_timeline()
        try:
            self._profile.export_chrome_trace(str(self._path))
            log.info("%-12s %s", "trace", self._path)
        except (OSError, RuntimeError) as error:  # a full disk ends no run
            log.warning("%-12s NOT WRITTEN: %s", "trace", error)
        self._profile, self._last = None, 0
