"""Recovery: after a failure it decides whether the run goes on, and starts the ranks again if so.

It ends the ranks, waits until it is known who is left, agrees on their world and where they meet, and starts
the next generation. The coordinator's part of it; no torch.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_PREEMPTED
from trainer.run.exit_record import STOPPED_THEN, ExitRecord, supervisor_lost
from trainer.supervise.coordinate.generation_state import Failure, GenerationState, Weight
from trainer.supervise.coordinate.membership import Exclusion, WorldPlan, exclusions, source_of
from trainer.supervise.coordinate.presence import REGROUP_S, Fence, Presence
from trainer.supervise.coordinate.relaunch import Relaunch, restart_line, too_few
from trainer.supervise.coordinate.run_state import RunState, StorageRetry
from trainer.supervise.coordinate.states import Event, State
from trainer.supervise.machine import now
from trainer.supervise.messages import Meet, Meeting, Regroup, Roster, Start, Stop
from trainer.supervise.restarts import RestartClock
from trainer.text.wording import many
from trainer.world.restart_policy import Fault, GiveUp, GoOn

GROW_S = 3.0
"""Wait, in seconds, for others to come back before the ranks start again because one did."""
_RANKS = 16


class Recovery:
    """Lets the run go on after a failure, or ends it."""

    def __init__(self, run: RunState, presence: Presence) -> None:
        self._run, self._presence = run, presence
        self._fence = Fence(run, presence)
        self.relaunch = Relaunch(run)
        self.others_there = True
        """False once a supervisor is gone from a run that cannot go on without it."""
        self._lost_meanwhile: Failure | None = None
        """Loss of a supervisor during a restart, after which the launcher must start all again."""

    def can_go_on(self, failure: Failure) -> bool:
        """Returns whether the ranks are to be started again: it would help, and nobody asked to stop."""
        return self._run.stop_at is None and self._would_help(failure)

    def _would_help(self, failure: Failure) -> bool:
        """Returns whether a restart may help, and can be made.

        A run whose ranks fail before their first step has a wrong input or a wrong environment, unless one
        node is to blame.
        """
        run = self._run
        return (
            run.limits.max_restarts > 0
            and run.reaches_all
            and failure.record.exit_code not in (EXIT_BAD_INPUT, EXIT_PREEMPTED)
            and (run.keeps_going or bool(run.starts_again) or (failure.others_there and self.others_there))
            and not run.generation.done
            and (self._has_trained or self._can_do_without(failure.record.unfit))
        )

    @property
    def _has_trained(self) -> bool:
        return bool(self._run.history) or self._run.has_begun()

    def _can_do_without(self, node: str) -> bool:
        """Returns whether the others make a world; before the first step of all it must be as large.

        Until then nothing is lost if the run ends, and a person may give it another node. "" is no node.
        """
        run = self._run
        world = run.membership.next_world(without=node) if node and run.keeps_going else None
        return world is not None and (self._has_trained or world.size >= len(run.generation.members))

    def fail(self, failure: Failure) -> None:
        """Decides about a failure: the run goes on, or ends."""
        self._run.go(Event.FAULT)
        self._run.spawn(self._decide(failure))

    def lose_during_restart(self, failure: Failure) -> None:
        """Records that a supervisor was lost while the ranks start again; the first loss counts."""
        run = self._run
        if not run.generation.asked:
            run.generation.asked = True
            run.spawn_lasting(self.relaunch.request(failure, run.generation.number + 1, run.present_step()))
        run.generation.causes.append((Weight.LOST, failure))  # the launcher's signals are then no request
        self._lost_meanwhile = self._lost_meanwhile or failure

    async def _decide(self, failure: Failure) -> None:
        run = self._run
        if not self.can_go_on(failure):
            await self._end(failure)
            return
        record = failure.record
        cause = record.reason.partition("; ")[0]
        if self._can_do_without(record.unfit):
            failure = replace(failure, kind="unfit")
            run.membership.exclude(record.unfit, "unfit", "it has failed the preflight")
        fault = Fault(record.rank, record.node, failure.step, cause, lost=failure.kind in ("lost", "unfit"))
        run.membership.record_fault(record.node)
        answer = await run.history.decide(fault, new_step=run.steps_done() > run.history.reached)
        failure = replace(failure, others_there=failure.others_there and self.others_there)
        if isinstance(answer, GiveUp):
            await self._end(failure, answer.reason)
        elif not self.can_go_on(failure):  # a stop or a lost supervisor came while the folder was read
            await self._end(failure)
        elif self.relaunch.is_needed(failure):
            await self.relaunch.leave(failure, fault, answer)
        else:
            await self._restart(failure, fault, answer, self._end_ranks(failure))

    async def _end(self, failure: Failure, why_no_restart: str = "") -> None:
        """Ends the run because of a failure, unless members that are lost to this one go on without it."""
        run = self._run
        number = failure.record.generation or run.generation.number
        if not await self._may_write(run.generation, patient=False):
            return
        record = replace(failure.record, generation=number)
        if self._has_stopped_a_run(failure):
            reason = f"{STOPPED_THEN} {record.reason}; a later start does again what was not saved"
            record = replace(record, exit_code=EXIT_PREEMPTED, reason=reason)
        own = replace(failure, record=record)
        await run.end_failed(own, why_no_restart)

    def _has_stopped_a_run(self, failure: Failure) -> bool:
        """Returns whether the run would have gone on after this failure, had it not been asked to stop.

        Nodes that are taken lose supervisors, ranks and loader processes in any order. A rank that fails when
        it saves may do that again the next time, so that counts.
        """
        run = self._run
        saved = EXIT_PREEMPTED in run.generation.done.values() and run.limits.max_restarts > 0
        lost = failure.kind == "lost"
        helps = (lost and saved) or ((lost or not failure.saving) and self._would_help(failure))
        return run.stop_at is not None and helps

    async def _may_write(
        self, its: GenerationState, world: WorldPlan | None = None, *, patient: bool = True
    ) -> bool:
        """Returns whether no other part of the run goes on; where members are lost, the claim shows that."""
        run = self._run
        if not (run.keeps_going and run.membership.lost):
            return True
        return await self._fence.is_ours(its, world, patient=patient)

    def _end_ranks(self, failure: Failure) -> GenerationState:
        """Lets all ranks end for the next generation, and returns that."""
        run = self._run
        run.history.reached = max(run.history.reached, float(run.present_step()))
        for member in failure.silent if run.keeps_going else ():
            self._presence.lose(member, silent=True)
        return run.begin_generation()

    async def _restart(self, failure: Failure, fault: Fault, go_on: GoOn, its: GenerationState) -> None:
        """Waits until every supervisor confirms that its rank has ended, and starts the next generation."""
        run, history = self._run, self._run.history
        clock = RestartClock(failure.at)
        clock.end_part("detect", now())
        world = await self._next_world(failure, its)
        if self._lost_meanwhile is not None and _is_of_one(self._lost_meanwhile, failure):
            await self.relaunch.leave(replace(failure, others_there=False), fault, go_on)
            return
        # From here on files of the run are written: where members are lost, the claim comes before.
        if world is None or not await self._may_write(its, world):
            return
        clock.end_part("end", now())
        its.saved_step = await history.saved_step()
        from_step, out_of_reach = self._source(its, world)
        history.reached = max(history.reached, float(from_step))  # ranks that leave tell no step any more
        run.say(restart_line(run, failure, fault, go_on, from_step, world))
        if out_of_reach is not None:
            node, step = run.membership.nodes[out_of_reach], its.kept[out_of_reach]
            lacks = f"clipship: step {step} is only in the memory of {node}, which has no rank now"
            disk = (
                f"the newest checkpoint, step {from_step}, serves" if from_step else "there is no checkpoint"
            )
            run.say(f"{lacks}: {disk}")
        without = self._exclusions(world)
        history.add(its.number, failure, fault, from_step, ranks=world.size, left_out=without)
        history.clock = clock
        await history.write()
        clock.end_part("agree", now())
        if go_on.wait_s:
            await run.until(lambda: self._lost_meanwhile is not None, go_on.wait_s)
            clock.end_part("wait", now())
        await self._start_generation(failure, its, world)

    def _exclusions(self, world: WorldPlan) -> tuple[Exclusion, ...]:
        before = self._run.history.last.left_out if self._run.history else ()
        return exclusions(self._run.membership, world, before, self._run.wall_time())

    async def _next_world(self, failure: Failure, its: GenerationState) -> WorldPlan | None:
        """Returns the world of those who are there and have ended their ranks; None if the run has ended."""
        run = self._run
        if not run.keeps_going:
            return await self._same_world(failure, its)
        limit = now() + (run.limits.init_s if run.respawns else 0.0)
        told = False
        while True:
            await self._presence.all_ended(its)
            run.go(Event.RANKS_ENDED)
            if (world := run.membership.next_world()) is not None:
                return world
            if now() >= limit:
                await self._end(failure, f"no restart, since {too_few(run)}")
                return None
            if not told:
                told = True
                await run.announce(its.number)
                run.say(
                    f"clipship: {too_few(run)}; waiting up to {run.limits.init_s:.0f} s for the launcher "
                    "to start a supervisor again"
                )
            await asyncio.sleep(0.2)  # until somebody comes back, who then ends its rank, too
            run.go(Event.CHANGED)

    async def _same_world(self, failure: Failure, its: GenerationState) -> WorldPlan | None:
        """Returns the world as it was, once all have ended their ranks; None if the run has ended.

        It does not wait for the ranks if a supervisor is lost, since the launcher then ends them all.
        """
        run = self._run

        def settled() -> bool:
            return self._lost_meanwhile is not None or len(its.ended) == len(its.members)

        await run.until(settled, REGROUP_S)  # without a lost supervisor's answer: the launcher ends all then
        left = [rank for rank, member in enumerate(its.members) if member not in its.ended]
        if left and self._lost_meanwhile is None:
            ranks = ", ".join(map(str, left[:_RANKS]))
            why = f"no restart, since rank {ranks} did not end in {REGROUP_S:g} s"
            await self._end(failure, why)
            return None
        run.go(Event.RANKS_ENDED)
        return run.world

    async def _start_generation(self, failure: Failure, its: GenerationState, world: WorldPlan) -> None:
        """Agrees with those who are there on where the ranks meet, claims the generation, and starts it.

        Others may come or go at any time; then all of that is done again.
        """
        run = self._run
        while True:
            meeting = None if self._lost_meanwhile else await self._meeting(its, world)
            if self._lost_meanwhile is not None:
                run.go(Event.FAULT)
                await self._decide(self._lost_meanwhile)
                return
            if meeting is not None and meeting.problem:
                why = f"no restart, since the ranks cannot meet again: {meeting.problem}"
                await self._end(failure, why)
                return
            if meeting is not None and self._is_settled(its, world):
                run.go(Event.AGREED)
                if run.keeps_going and not await self._fence.is_ours(its, world):
                    return
                if not run.keeps_going or run.membership.next_world() == world:
                    self._start(its, world, meeting.variables)
                    return
                its.number += 1  # this number is used up
            run.go(Event.CHANGED)
            changed = await self._next_world(failure, its)
            if changed is None:
                return
            world = changed
            run.history.change_last(ranks=world.size, left_out=self._exclusions(world))

    def _is_settled(self, its: GenerationState, world: WorldPlan) -> bool:
        """Returns whether nobody has come or gone since the world was agreed on."""
        run = self._run
        if not run.keeps_going:
            return True
        is_there = its.ended >= set(world.numbers) and not self._presence.has_orphans
        return is_there and run.membership.next_world() == world

    def _start(self, its: GenerationState, world: WorldPlan, variables: Mapping[str, str]) -> None:
        run = self._run
        its.members = world.numbers
        self._fence.record_start(its.number)
        start = Start(its.number, dict(variables), world.to_text() if run.keeps_going else "")
        run.go(Event.START)
        run.broadcast(start)
        self._presence.send_roster()  # who has none cannot go on without this supervisor, and ends the run
        run.watch(self._follow_start())

    async def _follow_start(self) -> None:
        # One after the other: two threads that write the same file may come in any order.
        await self._run.history.write()
        await self._run.watch_progress()

    def _source(self, its: GenerationState, world: WorldPlan) -> tuple[int, int | None]:
        """Returns what `source_of` says about the members who are there."""
        members = self._run.membership
        kept = {member: step for member, step in its.kept.items() if member not in members.lost}
        return source_of(kept, members.nodes, world, its.saved_step)

    async def _meeting(self, its: GenerationState, world: WorldPlan) -> Meeting | None:
        """Returns where the ranks meet; None if the new rank 0's supervisor, which chooses it, is silent."""
        run = self._run
        first = world.numbers[0]
        if not run.keeps_going or first == run.member:
            try:
                return Meeting(its.number, await run.own.choose_meeting())
            except OSError as error:
                return Meeting(its.number, problem=str(error))
        its.meeting = None
        run.broadcast(Meet(first, its.number))
        # It has confirmed that its rank has ended; if it is silent now, it is lost.
        await run.until(lambda: its.meeting is not None or first in run.membership.lost, REGROUP_S)
        if its.meeting is None:
            self._presence.lose(first, silent=True)
        return its.meeting

    async def regroup_again(self, its: GenerationState) -> None:
        """Tells a supervisor that was not there when the others were told to end their ranks."""
        await asyncio.sleep(0.2)  # several come at once, and one message to all is enough
        if self._run.generation is its and self._run.is_between and not its.regrouped_again:
            its.regrouped_again = True
            self._run.broadcast(Regroup(its.number))
            await asyncio.sleep(0.2)
            its.regrouped_again = False

    async def grow(self, its: GenerationState) -> None:
        """Lets the ranks save and leave if more of them can start, since members have come back."""
        await asyncio.sleep(GROW_S)
        run = self._run
        world = run.membership.next_world()
        if world is None or world.size <= len(its.members) or run.state is State.STOPPING:
            return
        its.growing = True
        run.go(Event.LEAVE)
        run.broadcast(Stop(to_grow=True))

    def rejoin(self) -> None:
        """Starts the ranks again after they have saved: this is no fault, and no step is done again."""
        run = self._run
        nodes = run.membership.nodes
        new = [member for member in run.membership.living if member not in run.generation.members]
        member = new[0] if new else run.member
        cause = f"{many(len(new), 'supervisor')} came back"
        fault = Fault(member, nodes[member], 0, cause)
        record = ExitRecord(member, nodes[member], EXIT_FAILED, cause, run.wall_time())
        failure = Failure(record, kind="taken in")
        run.spawn(self._restart(failure, fault, GoOn(0, 0.0), self._end_ranks(failure)))

    async def take_over(self, roster: Roster, ran: int, latest: int, dead: Sequence[int]) -> None:
        """Goes on in the place of a coordinator that is lost, which is the first in the roster's succession.

        `ran` is the last generation that has run, and `latest` the highest number that anybody has used.
        `dead` are those whose processes are surely gone; if the coordinator is none of them, it may be alive
        beyond a cut in the network.
        """
        run = self._run
        run.go(Event.FAULT)  # those who join meanwhile have lost their ranks by this loss
        if await run.exit_files.end() is not None:  # while this process was stopped
            run.leave("the others have ended the run meanwhile")
            return
        await self._fence.take_over(ran, dead)
        rows = await StorageRetry(run).answer(run.exit_files.restarts, ())
        for each in run.history.restore(rows):
            run.membership.record_fault(each.node)
            for row in each.left_out:
                run.membership.exclude(row.node, row.kind, row.reason)
        run.history.reach_restarted_steps()
        run.generation.number, run.generation.members = latest, roster.world.numbers
        root = roster.succession[0][0]
        self._presence.take_over(roster, dead)
        place = roster.world.place(root)
        rank = place.rank if place is not None else root
        reason = supervisor_lost("those below it have lost their connections")
        record = ExitRecord(
            rank, roster.node_of(root), EXIT_FAILED, reason, run.wall_time(), generation=latest
        )
        await self._decide(Failure(record, run.present_step(), kind="lost"))


def _is_of_one(loss: Failure, failure: Failure) -> bool:
    """Returns whether a supervisor was lost whose rank has failed: that is one event."""
    return (loss.record.rank, loss.record.node) == (failure.record.rank, failure.record.node)
