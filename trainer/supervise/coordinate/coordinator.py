"""The coordinator: takes messages from all supervisors and decides how the run ends, or goes on.

It is part of rank 0's supervisor; if that is lost, another one's coordinator takes over. The table in
`states` says which messages it takes when, and what follows. Its parts are the members that are there
(`presence`), the restart (`recovery`), the reports about a hang (`report_collection`) and the way in which
ranks leave (`stopping`); they share one `RunState`. No torch, no sockets.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from trainer.errors import EXIT_FAILED
from trainer.run.exit_files import WAIT_S
from trainer.run.exit_record import ExitRecord, supervisor_lost
from trainer.supervise import messages
from trainer.supervise.coordinate.diagnosis import cut_off
from trainer.supervise.coordinate.generation_state import Failure, Weight
from trainer.supervise.coordinate.presence import Presence
from trainer.supervise.coordinate.recovery import Recovery
from trainer.supervise.coordinate.report_collection import ReportCollection
from trainer.supervise.coordinate.run_state import RunState, StorageRetry
from trainer.supervise.coordinate.states import TABLE, State
from trainer.supervise.coordinate.stopping import Stopping
from trainer.supervise.machine import now
from trainer.supervise.messages import Message
from trainer.supervise.restarts import Kind

SETTLE_S = 0.4
"""Seconds between the first report of a failure and the decision.

Failures that follow from the first one may be reported before it.
"""


class Coordinator:
    """Decides once how the run ends, and before that after each fault whether it goes on."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        run.post = self._post
        self._presence = Presence(self._run)
        self._recovery = Recovery(self._run, self._presence)
        self._collection = ReportCollection(self._run, self._recovery)
        self._stopping = Stopping(self._run, self._recovery, self._collection)
        self._handlers: Mapping[type[Message], Callable[[Any], None]] = {
            messages.Joined: self._on_joined,
            messages.Lost: self._on_lost,
            messages.Cut: self._on_cut,
            messages.BadNode: self._on_bad_node,
            messages.Done: self._stopping.record_done,
            messages.StopRequest: self._stopping.request,
            messages.Failed: self._on_failed,
            messages.Late: self._on_late,
            messages.Report: self._collection.record_report,
            messages.Stack: self._collection.record_stack,
            messages.Ended: self._on_ended,
            messages.Meeting: self._on_meeting,
            messages.Progress: self._on_progress,
        }

    def receive(self, message: Message) -> None:
        """Handles one message from another supervisor or from this one, if the present state takes it."""
        if isinstance(message, messages.AboutRank) and message.generation != self._run.generation.number:
            return  # it was sent before its sender heard of the present generation
        if type(message) in TABLE[self._run.state].takes:
            self._handlers[type(message)](message)

    def _post(self, message: Message) -> None:
        """Handles a message of one of its own parts, after what they do just now."""
        asyncio.get_running_loop().call_soon(self.receive, message)

    def close(self) -> None:
        """Ends all its work; it decides nothing any more."""
        self._run.close()

    @property
    def state(self) -> State:
        """State of the run."""
        return self._run.state

    @property
    def members(self) -> tuple[tuple[int, str], ...]:
        """All members who are there, each with its node."""
        return self._run.members

    async def claim(self) -> None:
        """Claims this start's first generation, before another supervisor learns who is the coordinator.

        A run folder that does not answer keeps nobody from joining: it is asked on beside that.
        """
        await asyncio.wait([self._run.spawn(self._claim_first())], timeout=WAIT_S)

    async def _claim_first(self) -> None:
        run = self._run
        await StorageRetry(run).answer(partial(run.claim, run.context.world.generation, ""), None)

    async def begin(self) -> None:
        """Begins the generation that the launcher has started, see `Relaunch.begin`."""
        await self._unless_ended(self._recovery.relaunch.begin())

    async def take_over(self, roster: messages.Roster, ran: int, latest: int, dead: Sequence[int]) -> None:
        """Goes on in the place of another coordinator, which is lost, see `Recovery.take_over`."""
        await self._unless_ended(self._recovery.take_over(roster, ran, latest, dead))

    async def _unless_ended(self, work: Coroutine[Any, Any, None]) -> None:
        """Does the work, unless a message has ended the run, or does so meanwhile."""
        if self._run.state is State.ENDED:  # this supervisor's own `Joined` may know of a request to stop
            work.close()
        else:
            await asyncio.wait([self._run.spawn(work)])

    # Who comes and goes.

    def _on_joined(self, message: messages.Joined) -> None:
        run = self._run
        if self._presence.is_stuck(message.member) and not message.idle:
            return  # it has found its way back; else each restart would wait for its rank anew
        self._presence.join(message.member, message.node)
        if run.keeps_going:
            run.generation.kept[message.member] = message.in_memory
            self._place_newcomer(message)
        self._stopping.welcome(message)

    def _place_newcomer(self, message: messages.Joined) -> None:
        run, its, member = self._run, self._run.generation, message.member
        if run.is_between and message.idle:
            its.ended.add(member)
        elif run.is_between:
            run.spawn(self._recovery.regroup_again(its))
        elif member in its.members and _lacks_rank(message, its.number):
            reason = supervisor_lost("it has lost its rank and come back")
            node = run.membership.nodes[member]
            record = ExitRecord(its.members.index(member), node, EXIT_FAILED, reason, run.wall_time())
            self._record_cause(Weight.GONE, Failure(record, run.present_step(), kind="lost"))
        elif message.idle and member not in its.members and run.has_ranks:
            run.watch(self._recovery.grow(its))

    def _on_bad_node(self, message: messages.BadNode) -> None:
        """Excludes a node from the next generation on, if the others make a world that is as large."""
        run, node, why = self._run, message.node, message.why
        if run.keeps_going and node not in run.membership.excluded:
            run.membership.exclude(node, "condemned", why)
            world = run.membership.next_world()
            if world is not None and node in run.membership.unused(world):
                run.say(f"clipship: node {node}: {why}; it is left out from the next restart on")

    def _on_lost(self, message: messages.Lost) -> None:
        self._record_lost(replace(message, reason=supervisor_lost(message.reason)))

    def _on_cut(self, message: messages.Cut) -> None:
        """Records that a supervisor is cut off: it may live, and so may those whom it does not reach."""
        if self._run.keeps_going and message.member == self._run.member:
            self._run.leave(cut_off(message.other))
            return
        self._record_lost(messages.Lost(message.member, message.node, cut_off(message.other), silent=True))

    def _record_lost(self, lost: messages.Lost) -> None:
        run, its = self._run, self._run.generation
        rank = its.members.index(lost.member) if lost.member in its.members else lost.member
        record = ExitRecord(
            rank, lost.node, EXIT_FAILED, lost.reason, self._run.wall_time(), generation=its.number
        )
        if not run.keeps_going:
            self._lose_for_good(record)
            return
        self._presence.lose(lost.member, silent=lost.silent)
        if run.is_between:
            return  # the next world is made of those who are there
        if lost.member in its.members:
            self._record_cause(Weight.GONE, Failure(record, run.present_step(), kind="lost"))
        else:
            run.say(f"clipship: supervisor {lost.member} on {lost.node}, which has no rank: {lost.reason}")

    def _lose_for_good(self, record: ExitRecord) -> None:
        """Records a loss without which the ranks of these supervisors cannot go on."""
        run, recovery = self._run, self._recovery
        recovery.others_there = False
        step = run.present_step() or int(run.history.reached)  # ranks that were ended tell no step
        failure = Failure(record, step if run.starts_again else 0, others_there=False, kind="lost")
        if not run.is_between:
            self._record_cause(Weight.LOST, failure)
        elif run.starts_again:
            recovery.lose_during_restart(failure)
        else:
            run.end(record)

    # What fails.

    def _on_failed(self, message: messages.Failed) -> None:
        record = replace(message.record, generation=self._run.generation.number)
        if record.unfit:
            record = self._about_node(record)
        failed = Weight.FAILED_WAITING if message.waiting else Weight.FAILED
        weight = Weight.KILLED if message.killed else failed
        self._record_cause(weight, Failure(record, message.step, saving=message.saving))

    def _about_node(self, record: ExitRecord) -> ExitRecord:
        """Returns the record of a rank that found a node unfit as one of that node's first rank."""
        run = self._run
        ranks = (rank for rank in range(len(run.generation.members)) if run.node_of(rank) == record.unfit)
        return replace(record, rank=next(ranks, record.rank), node=record.unfit)

    def _record_cause(self, weight: Weight, failure: Failure) -> None:
        run, its, recovery = self._run, self._run.generation, self._recovery
        its.causes.append((weight, failure))
        if not its.asked and recovery.relaunch.is_needed(failure) and recovery.can_go_on(failure):
            its.asked = True
            weight, failure = its.first_cause
            # MPI leaves half a second until it kills all. One that failed in a collective is no cause.
            kind: Kind = "lost" if weight is Weight.FAILED_WAITING else failure.kind
            asked = replace(failure, kind=kind)
            run.spawn_lasting(recovery.relaunch.request(asked, its.number + 1, run.present_step()))
        if len(its.causes) == 1 and not its.collecting and run.has_ranks:
            run.watch(self._decide_on_first_cause())

    async def _decide_on_first_cause(self) -> None:
        run, causes = self._run, self._run.generation.causes
        # Nothing comes before a kill, so there is nothing to wait for.
        await run.until(lambda: any(weight is Weight.KILLED for weight, _ in causes), SETTLE_S)
        self._recovery.fail(run.generation.first_cause[1])

    def _on_late(self, message: messages.Late) -> None:
        self._run.watch(self._collection.collect(message.what))

    # What comes of a restart.

    def _on_ended(self, message: messages.Ended) -> None:
        its, membership = self._run.generation, self._run.membership
        its.ended.add(message.member)
        its.kept[message.member] = message.in_memory
        node = membership.nodes.get(message.member)
        if node is not None and message.member in membership.lost:  # it was only late
            membership.join(message.member, node)

    def _on_meeting(self, message: messages.Meeting) -> None:
        self._run.generation.meeting = message

    def _on_progress(self, message: messages.Progress) -> None:
        its, received_at = self._run.generation, now()
        its.steps_done, its.begun = message.steps_done, message.begun
        its.moments = {name: received_at - age for name, age in message.ages.items()}


def _lacks_rank(message: messages.Joined, generation: int) -> bool:
    """Returns whether a member of the generation has no rank of it, and will not hear that it should.

    Over a new connection it has not heard of a start before. What it says again over one that stands may have
    been on its way while the generation was started.
    """
    is_new = message.above is None
    return (is_new and message.ran < generation) or (message.idle and (is_new or message.ran >= generation))
