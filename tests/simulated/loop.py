"""An event loop on simulated time, and processes that it can freeze and kill between two of their steps."""

import asyncio
import contextvars
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count
from typing import Any

BEGAN_S = 1000.0
_PROCESS: contextvars.ContextVar["Process"] = contextvars.ContextVar("process")


class Stuck(RuntimeError):
    """Nothing will ever happen any more, and the story has not ended."""


class _Handle:
    """A callback that is to be called, in its context; asyncio's own asks for the debug mode each time."""

    __slots__ = ("arguments", "callback", "context", "is_cancelled", "loop")

    def __init__(self, loop: "SimulatedLoop", callback: Any, arguments: Any, context: Any) -> None:
        self.loop, self.callback, self.arguments = loop, callback, arguments
        self.context = contextvars.copy_context() if context is None else context
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def run(self) -> None:
        try:
            self.context.run(self.callback, *self.arguments)
        except Exception as error:
            told = {"message": f"error in {self.callback}", "exception": error, "handle": self}
            self.context.run(self.loop.call_exception_handler, told)


class Process:
    """All work that was begun in `run`, and what follows from it; it can be frozen and killed."""

    def __init__(self, loop: "SimulatedLoop") -> None:
        self._loop = loop
        self._waiting: list[_Handle] = []
        self.is_frozen = self.is_dead = False
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)
        self.at_end: list[Callable[[], object]] = []
        self.on_error: Callable[[Any, dict[str, Any]], object] | None = None
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        """All that it has begun, as far as that is not over."""

    @staticmethod
    def running() -> "Process | None":
        """Returns the process that runs now; None: it is the world."""
        return _PROCESS.get(None)

    @property
    def at_work(self) -> bool:
        """True if it can do something now."""
        return not (self.is_dead or self.is_frozen)

    def run(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function as this process, soon; what it spawns belongs to the process."""
        self._loop.call_soon(work, *arguments, context=self.context)

    def step(self, handle: _Handle) -> None:
        """Does one step of its work, or keeps it for later."""
        if self.is_frozen:
            self._waiting.append(handle)
        elif not self.is_dead:
            handle.run()

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        waiting, self._waiting = self._waiting, []
        self._loop.run_soon(waiting)

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
        self._seconds = BEGAN_S
        self._soon: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._number = count()

    def time(self) -> float:
        return self._seconds

    @property
    def timers(self) -> int:
        """Number of timers that will go off."""
        return sum(not handle.is_cancelled for _, _, handle in self._timers)

    def run_soon(self, handles: Iterable[_Handle]) -> None:
        self._soon.extend(handles)

    def _run_once(self) -> None:
        """Does all work until the loop is to stop."""
        soon, timers = self._soon, self._timers
        while not self._stopping:  # type: ignore[attr-defined]
            if not soon:
                self._jump()
            handle = soon.popleft()
            if handle.is_cancelled:
                continue
            process = handle.context.get(_PROCESS)
            if process is None:
                handle.run()
            else:
                process.step(handle)
            while timers and timers[0][2].is_cancelled:
                heappop(timers)

    def _jump(self) -> None:
        """Lets time go on to the next timer: no file descriptor is ever ready."""
        timers = self._timers
        if not timers:
            raise Stuck("nothing will ever happen any more")
        self._seconds = max(self._seconds, timers[0][0])
        while timers and timers[0][0] <= self._seconds:
            self._soon.append(heappop(timers)[2])

    def create_task(self, coro: Any, **options: Any) -> "asyncio.Task[Any]":
        task = super().create_task(coro, **options)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # as a killed process leaves it
        if (process := Process.running()) is not None:
            process.tasks.add(task)
        return task

    def set_exception_handler(self, handler: Any) -> None:
        """Sets that of the process that calls."""
        if (process := Process.running()) is None:
            super().set_exception_handler(handler)
        else:
            process.on_error = handler

    def call_exception_handler(self, context: Any) -> None:
        process = Process.running()
        if process is None or process.on_error is None:
            super().call_exception_handler(context)
        else:
            process.on_error(self, context)

    def _check_closed(self) -> None:
        pass

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        handle = _Handle(self, callback, args, context)
        self._soon.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return self.call_at(self._seconds + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        handle = _Handle(self, callback, args, context)
        heappush(self._timers, (when, next(self._number), handle))
        return handle

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError("a simulated process has no threads")
