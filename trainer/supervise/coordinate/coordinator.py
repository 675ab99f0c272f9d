"""The coordinator: collects messages from all supervisors and decides how the run ends, or goes on.

It is part of rank 0's supervisor; if that is lost, another one's coordinator takes over. Its parts are the
members that are there (`presence`), a request to stop (`stopping`), the reports about a hang
(`report_collection`) and the restart (`recovery`); they share one `RunState`. No torch, no sockets.

Supervisors send `joined`, `done`, `failed`, `late`, `lost`, `cut`, `stop`, `report`, `stack`, `ended`,
`meeting`, `progress` and `condemn`; the coordinator sends `stop`, `collect`, `stacks`, `regroup`, `meet`,
`start` and `end` to all of them. Messages about a rank carry the generation that it belongs to; those about
an earlier one are dropped. In messages about a supervisor, `rank` is its number, see `membership`.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord, supervisor_lost
from trainer.supervise.coordinate.actions import Actions, Message
from trainer.supervise.coordinate.diagnosis import Missing, cut_off
from trainer.supervise.coordinate.generation_state import Failure, Round, Weight
from trainer.supervise.coordinate.membership import Membership, WorldPlan
from trainer.supervise.coordinate.presence import Presence
from trainer.supervise.coordinate.recovery import Recovery
from trainer.supervise.coordinate.report_collection import ReportCollection
from trainer.supervise.coordinate.run_state import RunState
from trainer.supervise.coordinate.stopping import Stopping
from trainer.supervise.limits import Limits
from trainer.supervise.restarts import Kind

SETTLE_S = 0.4
"""Seconds between the first report of a failure and the decision.

Failures that follow from the first one may be reported before it.
"""


class Coordinator:
    """Decides once how the run ends, and before that after each fault whether it goes on."""

    def __init__(
        self,
        ranks: Sequence[int],
        limits: Limits,
        exit_files: ExitFiles,
        actions: Actions,
        *,
        membership: Membership | None = None,
        member: int = 0,
        keeps_going: bool = False,
        respawns: bool = False,
        starts_again: str = "",
        generation: int = 1,
    ) -> None:
        """`ranks` are the members of this generation, in the order of ranks, and `member` is this one.

        `keeps_going`, `respawns` and `starts_again` say what the launcher does when a supervisor is gone, see
        `world`.
        """
        self._run = RunState(
            ranks,
            limits,
            exit_files,
            actions,
            membership or Membership(ranks, len(ranks), len(ranks)),
            member=member,
            keeps_going=keeps_going,
            respawns=respawns,
            starts_again=starts_again,
            generation=generation,
        )
        self._presence = Presence(self._run, self._record_lost)
        self._recovery = Recovery(self._run, self._presence)
        self._collection = ReportCollection(self._run, self._recovery.fail)
        self._stopping = Stopping(self._run, self._collection.collect, self._recovery.relaunch.withdraw)

    def receive(self, message: Message) -> None:
        """Handles one message from another supervisor or from rank 0's own."""
        handler = getattr(self, f"_on_{message['kind']}", None)
        generation = self._run.round.generation
        outdated = message.get("generation", generation) != generation
        if handler is not None and not self._run.decided and not outdated:
            handler(message)

    def close(self) -> None:
        """Ends all its work; it decides nothing any more."""
        self._run.decided = True
        for task in [*self._run.tasks, *self._run.round.tasks]:
            task.cancel()

    @property
    def state(self) -> tuple[int, WorldPlan, tuple[tuple[int, str], ...]]:
        """Number and world of the present generation, and all members who are there, each with its node."""
        its = self._run.membership
        return (
            self._run.round.generation,
            self._run.world,
            tuple((member, its.nodes[member]) for member in its.living),
        )

    async def begin(self) -> None:
        """Begins the generation that the launcher has started, see `Relaunch.begin`."""
        await self._recovery.relaunch.begin()

    async def take_over(
        self,
        ran: int,
        generation: int,
        world: WorldPlan,
        members: Sequence[tuple[int, str]],
        root: Missing,
        dead: Sequence[int],
    ) -> None:
        """Goes on in the place of another coordinator, which is lost, see `Recovery.take_over`."""
        await self._recovery.take_over(ran, generation, world, members, root, dead)

    # Who comes and goes.

    def _on_joined(self, message: Message) -> None:
        """Records a supervisor.

        `idle` means that it has no rank, `asked` that it knows of a request to stop, and `in_memory` is as in
        `ended`.
        """
        member, run = message["rank"], self._run
        self._presence.join(member, message["node"])
        if run.keeps_going:
            run.round.kept[member] = message.get("in_memory", 0)
            self._place_newcomer(member, run.round, idle=bool(message.get("idle")))
        if run.stop_at is not None:
            self._stopping.pass_on()
        elif message.get("asked"):
            self._stopping.request(message)

    def _place_newcomer(self, member: int, its: Round, *, idle: bool) -> None:
        run = self._run
        if not its.started:
            if idle:
                its.ended.add(member)
            else:
                run.spawn(self._recovery.regroup_again(its), its.tasks)
        elif idle and member in its.members:
            reason = supervisor_lost("it has lost its rank and come back")
            node = run.membership.nodes[member]
            record = ExitRecord(its.members.index(member), node, EXIT_FAILED, reason, time.time())
            self._record_cause(Weight.GONE, Failure(record, run.present_step(), kind="lost"))
        elif idle:
            run.spawn(self._recovery.grow(its), its.tasks)

    def _on_condemn(self, message: Message) -> None:
        """Leaves a node out from the next generation on, if the others make a world that is as large."""
        run, node, why = self._run, message["node"], message["why"]
        if run.keeps_going and node not in run.membership.condemned:
            run.membership.condemn(node, why)
            world = run.membership.next_world()
            if world is not None and node in run.membership.left_out(world):
                run.actions.say(f"clipship: node {node}: {why}; it is left out from the next restart on")

    def _on_lost(self, message: Message) -> None:
        """Records that a supervisor is gone; `silent` means that it may still live beyond a cut."""
        rank, node = message["rank"], message["node"]
        self._record_lost(rank, node, supervisor_lost(message["reason"]), bool(message.get("silent")))

    def _on_cut(self, message: Message) -> None:
        """Records a supervisor that reports itself as cut off.

        It cannot reach a neighbour, which may be well on the other side.
        """
        if self._run.keeps_going and message["rank"] == self._run.member:
            self._run.decided = True
            self._run.actions.leave(message["other"])
            return
        self._record_lost(message["rank"], message["node"], cut_off(message["other"]), silent=True)

    def _record_lost(self, member: int, node: str, reason: str, silent: bool) -> None:
        """Records that a supervisor is gone."""
        run, its = self._run, self._run.round
        rank = its.members.index(member) if member in its.members else member
        record = ExitRecord(rank, node, EXIT_FAILED, reason, time.time(), generation=its.generation)
        if not run.keeps_going:
            self._recovery.others_there = False
            step = run.present_step() or int(run.history.reached)  # ranks that were ended tell no step
            failure = Failure(record, step if run.starts_again else 0, others_there=False, kind="lost")
            if its.started:
                self._record_cause(Weight.LOST, failure)
            elif run.starts_again:
                self._recovery.lose_during_restart(failure)
            else:
                run.decide(record)
            return
        self._presence.lose(member, silent=silent)
        if its.started and member in its.members:
            self._record_cause(Weight.GONE, Failure(record, run.present_step(), kind="lost"))
        elif its.started:
            run.actions.say(f"clipship: supervisor {member} on {node}, which has no rank: {reason}")

    # How the run ends.

    def _on_done(self, message: Message) -> None:
        its = self._run.round
        its.done[message["rank"]] = message["code"]
        its.reasons[message["rank"]] = message.get("reason", "")
        if len(its.done) == 1:
            self._run.spawn(self._all_done_in_time(), its.tasks)
            self._run.spawn(self._recovery.relaunch.withdraw())
        if len(its.done) == len(its.members):
            self._end_done()

    async def _all_done_in_time(self) -> None:
        """Waits `shutdown_s` for all ranks to end after the first.

        Ranks leave together, after a barrier, so one that stays behind is stuck in its clean-up.
        """
        shutdown_s = self._run.limits.shutdown_s
        await asyncio.sleep(shutdown_s)
        its = self._run.round
        # If the ranks were preempted, the state is saved and the reason known, so no diagnosis is needed.
        if EXIT_PREEMPTED in its.done.values():
            self._end_done()
        else:
            await self._collection.collect(
                f"{len(its.done)} of {len(its.members)} ranks are done; the others did not end within "
                f"timeouts.shutdown_s = {shutdown_s:g} s"
            )

    def _end_done(self) -> None:
        run, its = self._run, self._run.round
        code = max(its.done.values())
        if code == EXIT_PREEMPTED and its.growing and run.stop_at is None:
            if not its.failed:
                its.failed = True
                run.spawn(self._recovery.take_in())
            return
        rank = min(rank for rank, other_code in its.done.items() if other_code == code)
        reason = its.reasons[rank] or ("asked to stop" if code == EXIT_PREEMPTED else "done")
        if code == EXIT_DONE:
            # The last new step may be too short a while ago to have been seen.
            run.history.record_new_step(run.moments())
        run.decide(ExitRecord(rank, run.node_of(rank), code, reason, time.time()))

    def _on_stop(self, message: Message) -> None:
        self._stopping.request(message)

    # What fails.

    def _on_failed(self, message: Message) -> None:
        """Records that a rank failed."""
        record = replace(ExitRecord(**message["record"]), generation=self._run.round.generation)
        if record.unfit:
            record = self._about_node(record)
        failed = Weight.FAILED_WAITING if message["waiting"] else Weight.FAILED
        weight = Weight.KILLED if message.get("killed") else failed
        self._record_cause(
            weight, Failure(record, message.get("step", 0), saving=message.get("saving", True))
        )

    def _about_node(self, record: ExitRecord) -> ExitRecord:
        """Returns the record of a rank that found a node unfit as one of that node's first rank."""
        run = self._run
        ranks = (rank for rank in range(len(run.round.members)) if run.node_of(rank) == record.unfit)
        return replace(record, rank=next(ranks, record.rank), node=record.unfit)

    def _record_cause(self, weight: Weight, failure: Failure) -> None:
        run, its, recovery = self._run, self._run.round, self._recovery
        its.causes.append((weight, failure))
        if not its.asked and recovery.relaunch.is_needed(failure) and recovery.can_go_on(failure):
            its.asked = True
            weight, failure = its.first_cause
            # MPI leaves half a second until it kills all. One that failed in a collective is no cause.
            kind: Kind = "lost" if weight is Weight.FAILED_WAITING else failure.kind
            asked = replace(failure, kind=kind)
            run.spawn(recovery.relaunch.request(asked, its.generation + 1, run.present_step()))
        if len(its.causes) == 1 and not its.collecting:
            run.spawn(self._decide_on_first_cause(), its.tasks)

    async def _decide_on_first_cause(self) -> None:
        run, causes = self._run, self._run.round.causes
        # Nothing comes before a kill, so there is nothing to wait for.
        await run.until(lambda: any(weight is Weight.KILLED for weight, _ in causes), SETTLE_S)
        self._recovery.fail(run.round.first_cause[1])

    def _on_late(self, message: Message) -> None:
        self._run.spawn(self._collection.collect(message["what"]), self._run.round.tasks)

    def _on_report(self, message: Message) -> None:
        self._collection.record_report(message)

    def _on_stack(self, message: Message) -> None:
        self._collection.record_stack(message)

    # What comes of a restart.

    def _on_ended(self, message: Message) -> None:
        member, its = message["rank"], self._run.round
        its.ended.add(member)
        its.kept[member] = message.get("in_memory", 0)
        membership = self._run.membership
        if member in membership.lost:  # it was only late
            membership.join(member, membership.nodes[member])

    def _on_meeting(self, message: Message) -> None:
        self._run.round.meeting = message

    def _on_progress(self, message: Message) -> None:
        now = time.monotonic()
        moments = {name: now - age for name, age in message.get("ages", {}).items()}
        self._run.round.progress = {**message, "moments": moments}
