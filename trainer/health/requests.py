"""What people ask of a run from outside: stop, or save. Polled by the loop once a step; no torch."""

import signal
import time
from pathlib import Path
from types import FrameType

from trainer.health.pulse import Pulse

CHECKPOINT = "checkpoint.request"
"""`clipship checkpoint RUN` makes this file in the run folder; rank 0 takes it away."""
_LOOK_S = 1.0


class Requests:
    """The supervisor, or SIGUSR2, asks any rank to stop; the file asks rank 0 for a checkpoint."""

    def __init__(self, run_folder: Path, rank: int, pulse: Pulse) -> None:
        self._pulse = pulse
        self._file = run_folder / CHECKPOINT if rank == 0 else None
        self._stop = False
        self._looked = 0.0
        signal.signal(signal.SIGUSR2, self._on_stop)

    @property
    def stop(self) -> bool:
        """Save, and leave with 75."""
        return self._stop or self._pulse.stop_asked

    @property
    def checkpoint(self) -> bool:
        """Save, and go on. True once for each request; the file is looked for once a second."""
        if self._file is None or time.monotonic() - self._looked < _LOOK_S:
            return False
        self._looked = time.monotonic()
        if not self._file.exists():
            return False
        self._file.unlink(missing_ok=True)
        return True

    def _on_stop(self, _signal: int, _frame: FrameType | None) -> None:
        self._stop = True
