"""Common parts of the writers for services that take metrics: the run's id there, waits, an outbox."""

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainer.errors import Preempted
from trainer.safe_io.atomic import write_whole
from trainer.safe_io.plain import read_plain
from trainer.text.wording import many

WAIT_S = 30.0
"""Longest wait for a service; less than timeouts.shutdown_s, since the other ranks wait meanwhile."""


def waits(error: BaseException | None) -> bool:
    """Returns whether a run that ends so waits for a network: a rank that fails does not."""
    return error is None or isinstance(error, Preempted)


def why(error: Exception) -> str:
    """Returns the first line of a client's error."""
    return str(error).partition("\n")[0]


def lasting_id(path: Path) -> str:
    """Returns the id in the file; without a file, makes a new id and writes it there."""
    if not path.exists():
        write_whole(path, secrets.token_hex(8) + "\n")
    return read_plain(path).strip()


log = logging.getLogger("clipship")

_MOST = 10_000
"""Messages that wait at most; with one for every ten steps these are hours."""


class Outbox:
    """Sends messages in their order, from a thread of its own, so that no step waits for a network.

    What cannot be sent is counted and said, and never stops the run.
    """

    def __init__(self, service: str, otherwise: str) -> None:
        """`otherwise` says in a warning where the messages can be found."""
        self._service, self._otherwise = service, otherwise
        self._waiting: queue.Queue[Callable[[], object] | None] = queue.Queue(_MOST)
        self._lost = 0
        self._thread = threading.Thread(target=self._work, name=f"{service} outbox", daemon=True)
        self._thread.start()

    def put(self, send: Callable[[], object]) -> None:
        """Sends a message later, by a function that raises what went wrong. Returns at once."""
        try:
            self._waiting.put_nowait(send)
        except queue.Full:
            self._lost += 1

    def close(self, wait_s: float) -> None:
        """Waits until all is sent, at most so many seconds, and says what was not."""
        until = time.monotonic() + wait_s
        while self._thread.is_alive() and time.monotonic() < until:
            try:
                self._waiting.put(None, timeout=0.1)
                break
            except queue.Full:
                pass
        self._thread.join(max(0.0, until - time.monotonic()))
        left = self._lost + max(0, self._waiting.qsize() - 1) + self._thread.is_alive()
        if left:
            log.warning(
                "%s did not get %s of this start; %s", self._service, many(left, "message"), self._otherwise
            )

    def _work(self) -> None:
        while (send := self._waiting.get()) is not None:
            try:
                send()
            except Exception as error:  # a service's client raises what it likes
                if not self._lost:
                    text = "%s: a message could not be sent (%s); the run goes on"
                    log.warning(text, self._service, why(error)[:200])
                self._lost += 1
