"""Watches ranks in other pods: their exit records in the run folder, and whether rank 0's supervisor answers.

Imports no torch.
"""

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainer.errors import EXIT_FAILED, EXIT_START_AGAIN, EXIT_TIMED_OUT
from trainer.run.exit_files import exit_record_of
from trainer.run.exit_record import EXIT_DIR, ExitRecord, record_cause
from trainer.run.retry import names_in
from trainer.world.rendezvous import Rendezvous

SHOWN_S = 10.0
"""Seconds until a file that a worker wrote to the shared volume is seen here: network file systems cache
that it is missing."""
WATCH_S = 1.0


class Watch:
    """Starts mpirun's grace period when the run is over, while mpirun runs.

    The run is over when the ranks have recorded its end, or when rank 0's supervisor falls silent. mpirun
    itself waits minutes for a node that has lost power.
    """

    def __init__(
        self,
        run_folder: Path,
        rendezvous: Rendezvous,
        exit_dir: Path,
        silence_s: float,
        start_s: float,
        starts_again: Callable[[], bool] = lambda: False,
    ) -> None:
        """`starts_again` returns whether all supervisors have asked to be started again."""
        self._starts_again = starts_again
        self._run_folder, self._rendezvous, self._exit_dir = run_folder, rendezvous, exit_dir
        self._silence_s = 2 * silence_s + SHOWN_S
        self._start_s = start_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        began, last_answer = time.monotonic(), None
        while not self._over.wait(WATCH_S):
            now = time.monotonic()
            record = read_end(self._run_folder, self._rendezvous)
            if record is None and self._starts_again():
                record = self._of_rank_0(EXIT_START_AGAIN, "all ranks start again")
            if record is None and last_answer is not None and now - last_answer > self._silence_s:
                reason = (
                    f"rank 0's supervisor has not answered for {self._silence_s:g} s: its node failed, or "
                    "something killed it"
                )
                record = self._of_rank_0(EXIT_FAILED, reason)
            if record is None and last_answer is None and now - began > self._start_s:
                reason = (
                    f"mpirun has started no rank within {self._start_s:g} s (timeouts.init_s + "
                    "kubernetes.workers_ready_s)"
                )
                record = self._of_rank_0(EXIT_TIMED_OUT, reason)
            if record is not None:
                record_cause(record, {EXIT_DIR: str(self._exit_dir)})
                return
            if last_answer is None or now - last_answer > self._silence_s / 8:
                last_answer = now if listens(self._rendezvous) else last_answer

    def _of_rank_0(self, code: int, reason: str) -> ExitRecord:
        return ExitRecord(0, self._rendezvous.host.partition(".")[0], code, reason, time.time())


def read_end(folder: Path, rendezvous: Rendezvous) -> ExitRecord | None:
    """Returns how the start of this rendezvous ended; None if it goes on or left no record."""
    names_in(folder)
    return exit_record_of(folder, rendezvous.start)


def listens(rendezvous: Rendezvous) -> bool:
    """Returns whether rank 0's supervisor accepts connections."""
    try:
        socket.create_connection((rendezvous.host, rendezvous.port), 2.0).close()
    except OSError:
        return False
    return True
