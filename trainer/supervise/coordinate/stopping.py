"""Stopping: what the coordinator does when somebody asks the run to stop. No torch."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from trainer.errors import EXIT_PREEMPTED
from trainer.run.exit_record import ExitRecord
from trainer.supervise.coordinate.actions import Message
from trainer.supervise.coordinate.run_state import RunState

REPEAT_S = 5.0
"""Signals within this many seconds of the first are one request: launchers and schedulers send several."""


class Stopping:
    """Passes requests to stop on to the ranks, and ends the run if they do not leave in time."""

    def __init__(
        self,
        run: RunState,
        collect: Callable[[str], Awaitable[None]],
        withdraw: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """`collect` ends the run as timed out, for the reason that it is given.

        `withdraw` withdraws the request to start all again if they are killed.
        """
        self._run, self._collect, self._withdraw = run, collect, withdraw

    def request(self, message: Message) -> None:
        """Asks the ranks to save and leave on the first request.

        A request more than REPEAT_S later, or one marked `again`, ends the run at once.
        """
        run = self._run
        if run.starts_again and (run.round.causes or not run.round.started):
            return  # MPI signals all others when one has failed
        if run.stop_at is None:
            run.stop_at = time.monotonic()
            run.spawn(self._stopped_in_time())
            run.spawn(self._withdraw())
            self.pass_on()
        elif message.get("again") or time.monotonic() - run.stop_at > REPEAT_S:
            reason = f"a second signal ({message['signal']}) ended the run at once, without saving"
            run.decide(
                ExitRecord(message["rank"], message["node"], 128 + message["signal"], reason, time.time())
            )

    def pass_on(self) -> None:
        """Passes the request to stop to all.

        Before the first step is done there is nothing to save: once every supervisor has joined, all leave at
        once. Between two generations there are no ranks, and all leave at once too.
        """
        run = self._run
        if not run.round.started:
            self._leave_early(
                "asked to stop during a restart of the ranks; the run can go on from its checkpoint"
            )
        elif set(run.round.members) <= run.membership.nodes.keys() and not run.has_begun():
            self._leave_early("asked to stop before there was anything to save; the run can be started again")
        else:
            run.actions.broadcast({"kind": "stop"})

    def _leave_early(self, reason: str) -> None:
        self._run.decide(ExitRecord(0, self._run.node_of(0), EXIT_PREEMPTED, reason, time.time()))

    async def _stopped_in_time(self) -> None:
        limits = self._run.limits
        limit = limits.checkpoint_s + limits.shutdown_s
        await asyncio.sleep(limit)
        await self._collect(
            f"the run was asked to stop and had not ended after {limit:g} s "
            "(timeouts.checkpoint_s + timeouts.shutdown_s)"
        )
