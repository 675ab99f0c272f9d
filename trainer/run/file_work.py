"""File work beside an event loop, in threads that are there before they are needed.

A shared file system may hang together with the run, so that no thread comes back; then another one is
started. If there can be none, as under a limit of processes, the work waits for one that is busy, or is not
done: whoever asked for it goes on in any case. Imports no torch.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")


class FileWork:
    """Does file work in threads; an idle one takes the next piece."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0
        """Threads that wait, less the pieces of work that wait."""

    def prepare(self) -> None:
        """Starts a thread, so that the end of a run needs no new one.

        Raises RuntimeError if there can be none.
        """
        with self._lock:
            if self._free < 1:
                self._start()
                self._free += 1

    def do(self, work: Callable[[], None]) -> None:
        """Does work that nobody waits for and that raises nothing.

        A new thread does it if all are busy and there may be one more.
        """
        with self._lock:
            if self._free < 1:
                with suppress(RuntimeError):
                    self._start()
                    self._free += 1
            self._free -= 1
        self._work.put(work)

    def _start(self) -> None:
        threading.Thread(target=self._run, name="file work", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()
            with self._lock:
                self._free += 1

    async def within(self, seconds: float, work: Callable[[], Result]) -> Result | None:
        """Returns the result of file work, as `answered` does; None where that raises OSError."""
        with suppress(OSError):
            return await self.answered(seconds, work)
        return None

    async def answered(self, seconds: float, work: Callable[[], Result]) -> Result:
        """Returns the result of file work; raises what the work raises.

        Raises TimeoutError if the work cannot begin or takes longer than `seconds`; its thread is then
        abandoned and keeps no process alive.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()

        def attempt() -> None:
            try:
                finish = partial(result.set_result, work())
            except Exception as error:
                finish = partial(result.set_exception, error)
            with suppress(RuntimeError):  # the loop is closed: nobody waits for the result
                loop.call_soon_threadsafe(lambda: result.done() or finish())

        self.do(attempt)
        with suppress(TimeoutError):
            # Before Python 3.12, asyncio.wait_for hides a cancellation that comes together with the result; a
            # task that polls then never ends, nor does its process.
            async with asyncio.timeout(seconds):
                return await result
        raise TimeoutError("the run folder does not answer")


THREADS = FileWork()
"""Threads of this process."""
