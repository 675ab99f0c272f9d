"""Work in the background of a supervisor: what raises there ends the supervisor, and is never only lost.

A task that nobody awaits would otherwise take its part of the run with it in silence: a decision that is not
carried out is a run that stands for ever. No torch.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

_OURS = "clipship"


def spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    """Runs the work as one of the tasks; an error in it goes to `on_error`'s function."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    task.add_done_callback(_tell)
    return task


def on_error(end: Callable[[BaseException], None]) -> None:
    """Lets `end` hear of each error in a task of `spawn`, and in a callback of the running event loop.

    What asyncio reports besides, such as a caller that cannot be accepted, it shows as usual.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, asyncio.CancelledError):
            return  # the loop is closing
        if isinstance(error, BaseException) and ("handle" in context or _OURS in context):
            end(error)
        else:
            loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(handle)


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": "work of a supervisor failed", "exception": error, "task": task, _OURS: True}
        task.get_loop().call_exception_handler(context)
