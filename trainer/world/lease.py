"""Lease of a rank: it ends itself if its supervisor stands still while others may go on without the two.

A supervisor that is lost to the others ends its rank at once, and the kernel does if it dies. One that is
stopped can do neither. So it renews its rank's lease twice a second, and a rank whose lease has run out kills
itself, before the others start the next generation. No torch.
"""

import os
import signal
import threading
import time
from collections.abc import Callable

POLL_S = 0.5
_LONGEST_TURN_S = 1.0
"""Longest time between two looks that counts; if it was longer, this process did not run either."""


class Lease:
    """Counts the seconds in which a rank ran and its supervisor did not renew the lease."""

    def __init__(self, now: float) -> None:
        """`now` is in seconds, on any clock."""
        self._looked_at, self._renewed_at, self._unseen_s = now, -1.0, 0.0

    def has_run_out(self, renewed_at: float, lease_s: float, now: float) -> bool:
        """Looks at the time of the last renewal; returns whether that is longer ago than `lease_s`.

        A lease of 0 s never runs out. While the whole node is suspended, no time passes.
        """
        turn_s, self._looked_at = now - self._looked_at, now
        self._unseen_s = (
            0.0 if renewed_at != self._renewed_at else self._unseen_s + min(turn_s, _LONGEST_TURN_S)
        )
        self._renewed_at = renewed_at
        return 0.0 < lease_s < self._unseen_s


def watch(
    lease: Callable[[], tuple[float, float]], end: Callable[[], None] | None = None, poll_s: float = POLL_S
) -> threading.Thread:
    """Starts a thread that ends this process, and all that it started, when its lease has run out.

    `lease` returns the time of the last renewal and the seconds for which that holds. `end` takes the place
    of the kill.
    """
    thread = threading.Thread(
        target=_watch, args=(lease, end or _kill_group, poll_s), name="lease", daemon=True
    )
    thread.start()
    return thread


def _watch(lease: Callable[[], tuple[float, float]], end: Callable[[], None], poll_s: float) -> None:
    its = Lease(time.monotonic())
    while not its.has_run_out(*lease(), time.monotonic()):
        time.sleep(poll_s)
    end()


def _kill_group() -> None:
    """Kills this process with all that it started; a rank leads its group, see `rank_process`."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
