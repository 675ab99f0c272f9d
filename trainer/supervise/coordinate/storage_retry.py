"""Patience with a run folder that does not answer while the ranks are about to start again. No torch."""

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from trainer.supervise.coordinate.run_state import RunState

AGAIN_S = 0.5
"""Seconds between two tries."""
Answer = TypeVar("Answer")
Otherwise = TypeVar("Otherwise")


class Patience:
    """Allows a run folder the time that a start has, `timeouts.init_s`."""

    def __init__(self, run: RunState) -> None:
        self._run, self._until = run, time.monotonic() + run.limits.init_s
        self._told = False

    async def lasts(self) -> bool:
        """Waits a moment; returns whether to try again."""
        run = self._run
        if not run.limits.run_folder or run.decided or time.monotonic() >= self._until:
            return False
        if not self._told:
            self._told = True
            run.actions.say(
                f"clipship: the run folder does not answer; waiting up to {run.limits.init_s:.0f} s for it "
                "before the ranks start again"
            )
        await run.until(lambda: run.decided, AGAIN_S)
        return True

    async def answer(self, ask: Callable[[], Awaitable[Answer]], otherwise: Otherwise) -> Answer | Otherwise:
        """Returns the answer to a question that raises TimeoutError if the folder does not answer."""
        while True:
            try:
                return await ask()
            except TimeoutError:
                if not await self.lasts():
                    return otherwise
