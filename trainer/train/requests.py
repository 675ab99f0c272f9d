"""Requests to a run from outside: stop, or save a checkpoint.

The loop polls them once a step. Imports no torch.
"""

import signal
import time
from pathlib import Path
from types import FrameType

from trainer.run.layout import CHECKPOINT_REQUEST
from trainer.world.heartbeat import Heartbeat

_CHECK_EVERY_S = 1.0


class Requests:
    """Reads requests: the supervisor or SIGUSR2 asks any rank to stop; a file asks for a checkpoint."""

    def __init__(self, run_folder: Path, rank: int, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._file = run_folder / CHECKPOINT_REQUEST if rank == 0 else None
        self._stop = False
        self._checked_at = 0.0
        signal.signal(signal.SIGUSR2, self._on_stop)

    @property
    def stop(self) -> bool:
        """True once this rank is asked to save and to leave with exit code 75."""
        return self._stop or self._heartbeat.stop_requested

    @property
    def checkpoint(self) -> bool:
        """True if a checkpoint is asked for; the run then goes on.

        True once for each request; the file is checked once a second.
        """
        if self._file is None or time.monotonic() - self._checked_at < _CHECK_EVERY_S:
            return False
        self._checked_at = time.monotonic()
        if not self._file.exists():
            return False
        self._file.unlink(missing_ok=True)
        return True

    def _on_stop(self, _signal: int, _frame: FrameType | None) -> None:
        self._stop = True
