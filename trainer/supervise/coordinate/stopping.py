"""Lets ranks leave: when somebody asks the run to stop, when more of them can start, when all is done.

The coordinator's part of it; no torch.
"""

import asyncio

from trainer.errors import EXIT_DONE, EXIT_PREEMPTED
from trainer.run.exit_record import ExitRecord
from trainer.supervise.coordinate.recovery import Recovery
from trainer.supervise.coordinate.report_collection import ReportCollection
from trainer.supervise.coordinate.run_state import RunState
from trainer.supervise.coordinate.states import Event, State
from trainer.supervise.machine import now
from trainer.supervise.messages import Done, Joined, Stop, StopRequest
from trainer.supervise.network import link


class Stopping:
    """Passes requests to stop on to the ranks, and ends the run when all have left, or do not in time."""

    def __init__(self, run: RunState, recovery: Recovery, collection: ReportCollection) -> None:
        self._run, self._recovery, self._collection = run, recovery, collection
        self._asked_at: dict[tuple[bool, int], float] = {}
        """Time of the first request of each sender: a supervisor, or a program outside of the run."""

    def request(self, message: StopRequest) -> None:
        """Asks the ranks to save and leave on the first request.

        One of the same sender more than REPEAT_S later, or one marked `again`, ends the run at once. Another
        node that is drained meanwhile only asks for what goes on.
        """
        run = self._run
        if self._may_be_the_launchers and not message.outside:
            return
        first_at = self._asked_at.setdefault((message.outside, message.rank), now())
        if run.stop_at is None:
            self._ask()
        elif message.again or now() - first_at > link.REPEAT_S:
            reason = f"a second signal ({message.signal}) ended the run at once, without saving"
            run.end(ExitRecord(message.rank, message.node, 128 + message.signal, reason, run.wall_time()))

    def welcome(self, message: Joined) -> None:
        """Tells a supervisor that joins of a request to stop, or takes up the one that it knows of.

        It may have got a signal before it joined, or the request may have been a lost coordinator's.
        """
        if message.signalled and not self._may_be_the_launchers:
            self._asked_at.setdefault((False, message.member), now())
        if self._run.stop_at is not None:
            self.pass_on()
        elif message.asked and not self._may_be_the_launchers:
            self._ask()

    def _ask(self) -> None:
        run = self._run
        run.stop_at = now()
        run.spawn_lasting(self._recovery.relaunch.withdraw())
        if not run.is_between:
            run.go(Event.LEAVE)
        if run.has_ranks:
            run.watch(self._stopped_in_time())
        self.pass_on()

    @property
    def _may_be_the_launchers(self) -> bool:
        """True if a signal may be the launcher's: MPI signals all others when one has failed."""
        run = self._run
        return bool(run.starts_again) and (bool(run.generation.causes) or run.is_between)

    def pass_on(self) -> None:
        """Passes the request to stop to all.

        Before the first step is done there is nothing to save, unless the ranks go on from a step in memory:
        once every supervisor has joined, all leave at once. Between two generations there are no ranks, and
        all leave at once too.
        """
        run = self._run
        all_there = set(run.generation.members) <= run.membership.nodes.keys()
        if run.is_between:
            self._leave_early(
                "asked to stop during a restart of the ranks; the run can go on from its checkpoint"
            )
        elif all_there and not run.has_begun() and not self._go_on_from_memory:
            self._leave_early("asked to stop before there was anything to save; the run can be started again")
        else:
            run.broadcast(Stop())

    @property
    def _go_on_from_memory(self) -> bool:
        """True if the ranks go on from a step after the newest checkpoint's, so that it is only in memory."""
        history, its = self._run.history, self._run.generation
        return bool(history) and history.last.from_step > max(history.last.saved_step, its.saved_step)

    def _leave_early(self, reason: str) -> None:
        run = self._run
        run.end(ExitRecord(0, run.node_of(0), EXIT_PREEMPTED, reason, run.wall_time()))

    async def _stopped_in_time(self) -> None:
        limits = self._run.limits
        limit = limits.checkpoint_s + limits.shutdown_s
        await asyncio.sleep(limit)
        await self._collection.collect(
            f"the run was asked to stop and had not ended after {limit:g} s "
            "(timeouts.checkpoint_s + timeouts.shutdown_s)"
        )

    def record_done(self, message: Done) -> None:
        """Records that a rank is done; the run ends when all are."""
        run, its = self._run, self._run.generation
        is_first = not its.done
        its.done[message.rank] = message.code
        its.reasons[message.rank] = message.reason
        run.go(Event.LEAVE)
        if is_first:
            run.spawn_lasting(self._recovery.relaunch.withdraw())
            if run.has_ranks:
                run.watch(self._all_done_in_time())
        if len(its.done) == len(its.members):
            self._end_done()

    async def _all_done_in_time(self) -> None:
        """Waits `shutdown_s` for all ranks to end after the first.

        Ranks leave together, after a barrier, so one that stays behind is stuck in its clean-up.
        """
        shutdown_s = self._run.limits.shutdown_s
        await asyncio.sleep(shutdown_s)
        its = self._run.generation
        # If the ranks were preempted, the state is saved and the reason known, so no diagnosis is needed.
        if EXIT_PREEMPTED in its.done.values():
            self._end_done()
        else:
            await self._collection.collect(
                f"{len(its.done)} of {len(its.members)} ranks are done; the others did not end within "
                f"timeouts.shutdown_s = {shutdown_s:g} s"
            )

    def _end_done(self) -> None:
        run, its = self._run, self._run.generation
        code = max(its.done.values())
        if code == EXIT_PREEMPTED and its.growing and run.stop_at is None:
            if run.state is State.STOPPING:  # else a failure is being decided on
                self._recovery.rejoin()
            return
        rank = min(rank for rank, other_code in its.done.items() if other_code == code)
        reason = its.reasons[rank] or ("asked to stop" if code == EXIT_PREEMPTED else "done")
        if code == EXIT_DONE:
            # The last new step may be too short a while ago to have been seen.
            run.history.record_new_step(run.moments())
        run.end(ExitRecord(rank, run.node_of(rank), code, reason, self._run.wall_time()))
