"""Watches ranks in other pods: their exit records in the run folder, and whether rank 0's supervisor answers.

Imports no torch.
"""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trainer.errors import EXIT_FAILED, EXIT_TIMED_OUT
from trainer.run.exit_files import exit_record_of
from trainer.run.exit_record import ExitRecord
from trainer.run.retry import names_in
from trainer.world.rendezvous import Rendezvous

SHOWN_S = 10.0
"""Seconds until a file that a worker wrote to the shared volume is seen here: network file systems cache
that it is missing."""
WATCH_S = 1.0


@dataclass
class Watch:
    """Says, while mpirun runs, whether the run is over.

    It is when the ranks have recorded its end or ask to be started again, and when rank 0's supervisor falls
    silent. mpirun itself waits minutes for a node that has lost power.
    """

    run_folder: Path
    rendezvous: Rendezvous
    silence_s: float
    start_s: float
    starts_again: Callable[[], bool] = lambda: False
    """Returns whether all supervisors have asked to be started again."""
    end: ExitRecord | None = None
    """End of the run, as the ranks have recorded it or as it looks from here."""
    _began: float = field(default_factory=time.monotonic)
    _last_answer: float | None = None

    def is_over(self) -> bool:
        """Returns whether the run is over; to be asked every second or so."""
        now, longest_s = time.monotonic(), 2 * self.silence_s + SHOWN_S
        names_in(self.run_folder)
        self.end = exit_record_of(self.run_folder, self.rendezvous.start)
        if self.end is not None or self.starts_again():
            return True
        if self._last_answer is None and now - self._began > self.start_s:
            reason = (
                f"mpirun has started no rank within {self.start_s:g} s (timeouts.init_s + "
                "kubernetes.workers_ready_s)"
            )
            self.end = self._of_rank_0(EXIT_TIMED_OUT, reason)
        elif self._last_answer is not None and now - self._last_answer > longest_s:
            reason = (
                f"rank 0's supervisor has not answered for {longest_s:g} s: its node failed, or "
                "something killed it"
            )
            self.end = self._of_rank_0(EXIT_FAILED, reason)
        elif self._last_answer is None or now - self._last_answer > longest_s / 8:
            self._last_answer = now if listens(self.rendezvous) else self._last_answer
        return self.end is not None

    def _of_rank_0(self, code: int, reason: str) -> ExitRecord:
        return ExitRecord(0, self.rendezvous.host.partition(".")[0], code, reason, time.time())


def listens(rendezvous: Rendezvous) -> bool:
    """Returns whether rank 0's supervisor accepts connections."""
    try:
        socket.create_connection((rendezvous.host, rendezvous.port), 2.0).close()
    except OSError:
        return False
    return True
