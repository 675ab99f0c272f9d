"""An event loop on simulated time, and processes that it can freeze and kill between two of their steps."""

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

_START_S = 1000.0
_PROCESS: contextvars.ContextVar["Process"] = contextvars.ContextVar("process")


class Stuck(RuntimeError):
    """Nothing will ever happen any more, and the story has not ended."""


class Process:
    """All work that was begun in `run`, and what follows from it; it can be frozen and killed."""

    def __init__(self, loop: "SimulatedLoop") -> None:
        self._loop = loop
        self._waiting: list[Callable[[], object]] = []
        self.is_frozen = self.is_dead = False
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)
        self.at_end: list[Callable[[], object]] = []

    def run(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function as this process, soon; what it spawns belongs to the process."""
        self._loop.call_soon(work, *arguments, context=self.context)

    def step(self, callback: Callable[..., object], arguments: Any) -> None:
        """Does one step of its work, or keeps it for later."""
        if self.is_frozen:
            self._waiting.append(lambda: callback(*arguments))
        elif not self.is_dead:
            callback(*arguments)

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            self._loop.call_soon(work, context=self.context)

    def kill(self) -> None:
        """Ends it between two steps, as SIGKILL does."""
        if not self.is_dead:
            self.is_dead, self._waiting = True, []
            for work in self.at_end:
                work()


class SimulatedLoop(asyncio.BaseEventLoop):
    """Event loop whose clock jumps to the next timer as soon as nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds = _START_S
        self._selector = self

    def time(self) -> float:
        return self._seconds

    def select(self, timeout: float | None) -> list[Any]:
        """Lets time go on to the next timer: no file descriptor is ever ready."""
        if timeout is None:
            raise Stuck("nothing will ever happen any more")
        if timeout > 0:
            self._seconds = max(self._seconds, self._scheduled[0].when())  # type: ignore[attr-defined]
        return []

    def create_task(self, coro: Any, **options: Any) -> "asyncio.Task[Any]":
        task = super().create_task(coro, **options)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # as a killed process leaves it
        return task

    def _check_closed(self) -> None:
        pass

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        callback, args = _owned(callback, args, context)
        return super().call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        callback, args = _owned(callback, args, context)
        return super().call_at(when, callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError("a simulated process has no threads")


def _owned(callback: Any, arguments: Any, context: contextvars.Context | None) -> tuple[Any, Any]:
    process = _PROCESS.get(None) if context is None else context.get(_PROCESS)
    return (callback, arguments) if process is None else (process.step, (callback, arguments))
