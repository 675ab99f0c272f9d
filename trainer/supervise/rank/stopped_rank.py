"""Notices a rank that a signal has stopped. No torch."""

from collections.abc import Callable

STOPPED_S = 3.0
"""Seconds for which a rank must be seen stopped: whoever suspends a whole run stops ranks a moment before
their supervisors, or wakes them a moment later."""


class StoppedRank:
    """Measures for how long one process after the other has been stopped (SIGSTOP)."""

    def __init__(self, is_stopped: Callable[[int], bool], clock: Callable[[], float]) -> None:
        """`is_stopped` says whether the process of an id is stopped now; `clock` returns seconds."""
        self._is_stopped, self._clock = is_stopped, clock
        self._pid = 0
        self._since = 0.0

    def forget(self) -> None:
        """Begins anew: this process was suspended itself, so what it has seen before says nothing."""
        self._pid = 0

    def is_lasting(self, pid: int) -> bool:
        """Returns whether each call for STOPPED_S has found this process stopped."""
        if not self._is_stopped(pid):
            self._pid = 0
            return False
        if self._pid != pid:
            self._pid, self._since = pid, self._clock()
        return self._clock() - self._since >= STOPPED_S
