"""An event loop whose clock jumps: nobody waits for a timer, only for sockets, processes and file work.

While there is nothing else to do, `time.monotonic` goes on to the next timer at once. So a story of
supervisors takes as long as its work, and on the only clock that it sees each wait lasts as long as ever.
"""

import asyncio
import selectors
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from trainer.run.file_work import THREADS

Result = TypeVar("Result")
_real = time.monotonic
_ROUNDS = 3
"""Packets of a connection that follow one another: each is sent when the one before has come."""
_PAUSE_S = 0.1
"""Real seconds between two looks at the sockets that count as work."""
_GRACE_S = 0.0002
"""Real seconds that a message over a socket has to arrive before the clock jumps."""


class Clock:
    """Seconds that have been jumped over, and the work in threads for which the clock waits."""

    def __init__(self, grace_s: float = _GRACE_S) -> None:
        self.grace_s = grace_s
        self.jumped_s = 0.0
        self.in_threads = 0
        self._seen, self._latest = _real(), 0.0

    def monotonic(self) -> float:
        self._latest = max(self._latest, _real() + self.jumped_s)
        return self._latest

    def forgive_pause(self) -> None:
        """Takes back the time for which a busy machine let this process wait since the last call.

        An answer that lies in a socket meanwhile is not late.
        """
        paused_s, self._seen = _real() - self._seen, _real()
        if self.in_threads == 0:
            self.jumped_s -= max(0.0, paused_s - _PAUSE_S)

    def jump(self, seconds: float) -> None:
        """Goes on without anything happening meanwhile, as for a process that is stopped (SIGSTOP)."""
        self.jumped_s += seconds


class _Selector(selectors.DefaultSelector):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._echo = socket.socket(type=socket.SOCK_DGRAM)
        self._echo.bind(("127.0.0.1", 0))
        self._echo.connect(self._echo.getsockname())

    def close(self) -> None:
        self._echo.close()
        super().close()

    def _deliver(self) -> None:
        """Returns once the kernel has delivered what was sent on loopback, connections and their ends too.

        It delivers in order, and on a busy machine some milliseconds late.
        """
        for _ in range(_ROUNDS):
            self._echo.send(b"x")
            self._echo.recv(1)

    def select(self, timeout: float | None = None) -> Any:
        self._clock.forgive_pause()
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        self._deliver()
        is_busy = self._clock.in_threads > 0  # asked first: a thread may end, and say so, just after the look
        if ready := super().select(min(timeout, self._clock.grace_s)):
            return ready
        if is_busy:
            return super().select(min(timeout, 0.01))
        self._clock.jump(timeout)
        return []


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Clock) -> None:
        super().__init__(_Selector(clock))
        self._its_clock = clock

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        self._its_clock.in_threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._come_back)
        return future

    def _come_back(self, _: object) -> None:
        self._its_clock.in_threads -= 1


@contextmanager
def _counting_file_work(clock: Clock) -> Iterator[None]:
    do = THREADS.do

    def counted(work: Callable[[], None]) -> None:
        def until_done() -> None:
            try:
                work()
            finally:
                clock.in_threads -= 1

        clock.in_threads += 1
        do(until_done)

    with patch.object(THREADS, "do", counted):
        yield


def run(story: Coroutine[Any, Any, Result], limit_s: float = 60.0, clock: Clock | None = None) -> Result:
    """Runs a story in a loop of its own. Raises TimeoutError if it takes longer, on its clock, than that."""
    its = clock or Clock()
    with (
        patch("time.monotonic", its.monotonic),
        _counting_file_work(its),
        asyncio.Runner(loop_factory=lambda: _Loop(its)) as runner,
    ):
        return runner.run(asyncio.wait_for(story, limit_s))
