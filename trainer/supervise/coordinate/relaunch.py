"""Relaunch: restarts for which the launcher must start all supervisors again.

MPI ends all processes when one is lost. The coordinator lets all leave; the next one counts on from what it
finds in the run folder. No torch.
"""

import asyncio
from dataclasses import replace

from trainer.errors import EXIT_FAILED, EXIT_START_AGAIN
from trainer.run.exit_record import ExitRecord, rank_name
from trainer.run.launcher_word import StartRequest
from trainer.supervise.coordinate.generation_state import Failure
from trainer.supervise.coordinate.membership import WorldPlan
from trainer.supervise.coordinate.run_state import RunState, StorageRetry
from trainer.supervise.coordinate.states import Event
from trainer.supervise.machine import now
from trainer.supervise.restarts import Kind, RestartClock
from trainer.text.wording import many
from trainer.world.restart_policy import Fault, GiveUp, GoOn

LEAVE_S = 4.0
"""Longest wait, in seconds, for every supervisor to confirm that its rank has ended before all leave."""
KILLED_TOGETHER = "all ranks were killed at once, before a supervisor could say why"


class Relaunch:
    """Lets all supervisors leave and be started again, and goes on after that."""

    def __init__(self, run: RunState) -> None:
        self._run = run

    def is_needed(self, failure: Failure) -> bool:
        """Returns whether a restart after this failure needs the launcher."""
        when = self._run.starts_again
        return when == "always" or bool(when and not failure.others_there)

    async def leave(self, failure: Failure, fault: Fault, go_on: GoOn) -> None:
        """Lets all supervisors leave, so that the launcher starts them again as the next generation."""
        run = self._run
        steps_done = run.present_step() or int(run.history.reached)  # ranks that were ended tell no step
        its = run.begin_generation()
        its.asked = True
        # First of all: MPI may end this process at any moment, and what is missing is counted at the start.
        await self.request(failure, its.number, steps_done)
        world = run.world
        from_step = max(await run.history.saved_step(), run.in_memory())
        run.say(restart_line(run, failure, fault, go_on, from_step, world))
        run.history.add(its.number, failure, fault, from_step, ranks=world.size)
        await run.history.write()
        if failure.others_there:
            await run.until(lambda: its.ended >= set(its.members), LEAVE_S)
        await asyncio.sleep(go_on.wait_s)  # the back-off, which the launcher knows nothing of
        run.go(Event.END)
        run.finish(replace(failure.record, exit_code=EXIT_START_AGAIN))

    async def request(self, failure: Failure, generation: int, steps_done: int) -> None:
        """Asks the launcher, by a file, to start all supervisors again as this generation."""
        its = StartRequest(
            replace(failure.record, generation=generation),
            steps_done=steps_done,
            in_memory=self._run.in_memory(),
            fault_step=failure.step if failure.kind == "fault" else 0,
        )
        await self._run.exit_files.request_start(its)

    async def begin(self) -> None:
        """Begins the generation: the first one anew, a later one where the last coordinator left off."""
        run = self._run
        if run.generation.number == 1:
            await run.exit_files.remove_old()
        else:
            await self._resume()
        if not run.has_ranks:  # a message has come meanwhile that ends the run, or the ranks
            return
        # "lost": a generation may begin without the launcher, and the request would name one that has begun.
        if run.starts_again == "always":
            run.watch(self._ask_if_killed())
        run.watch(run.watch_progress())

    async def withdraw(self) -> None:
        """Withdraws the request for the case that all are killed: the run is about to end."""
        if self._run.starts_again == "always":
            await self._run.exit_files.withdraw_start()

    async def _ask_if_killed(self) -> None:
        """Asks for the next generation in case that all are killed at once, once the ranks have trained.

        Under PMIx, Slurm may do that within the same moment in which one rank dies.
        """
        run = self._run
        await run.until(lambda: bool(run.history) or run.has_begun(), float("inf"))
        if run.stop_at is not None or run.generation.done:
            return
        record = ExitRecord(0, "", EXIT_FAILED, KILLED_TOGETHER, self._run.wall_time())
        following = replace(record, generation=run.generation.number + 1)
        await run.exit_files.request_start(StartRequest(following), if_killed=True)

    async def _resume(self) -> None:
        """Goes on where the last generation's coordinator left off; the launcher has started all again.

        If that one was lost, the fault is counted here.
        """
        run, history = self._run, self._run.history
        # Before the ranks, which start meanwhile, keep and save newer steps.
        in_memory, saved = run.in_memory(), await history.saved_step()
        for each in history.restore(await StorageRetry(run).answer(run.exit_files.restarts, ())):
            run.membership.record_fault(each.node)
        generation = run.generation.number
        if not history or history.last.generation < generation:
            request = await run.exit_files.requested_start()
            if (
                request is not None
                and request.record.generation == generation
                and not await self._count_unrecorded(request, in_memory, saved)
            ):
                return
        history.reach_restarted_steps()
        if history:
            seconds_ago = max(0.0, self._run.wall_time() - history.last.time)
            history.clock = RestartClock(now() - seconds_ago)

    async def _count_unrecorded(self, request: StartRequest, in_memory: int, saved: int) -> bool:
        """Counts a fault that nobody has recorded; returns False if the run ends because of it.

        `in_memory` is the newest step that this node had kept, `saved` that of the newest checkpoint. A new
        node has none in memory, so the step that the request names counts, too.
        """
        run, record = self._run, request.record
        cause = record.reason.partition("; ")[0]
        history = run.history
        saved = 0 if 0 < request.steps_done < saved else saved  # the ranks have saved again meanwhile
        from_step = max(saved, in_memory, request.in_memory)
        steps_done = max(request.steps_done, from_step)
        kind: Kind = "fault" if request.fault_step else "lost"
        fault = Fault(record.rank, record.node, request.fault_step or steps_done, cause, lost=kind == "lost")
        history.reach_restarted_steps()
        run.membership.record_fault(record.node)
        answer = await history.decide(fault, new_step=steps_done > history.reached)
        if isinstance(answer, GiveUp):
            run.end(replace(record, reason=f"{record.reason}; {answer.reason}", start=""))
            return False
        seconds_ago = self._run.wall_time() - record.time
        failure = Failure(replace(record, details=""), kind=kind, at=now() - seconds_ago)
        history.add(record.generation, failure, fault, from_step, ranks=len(run.generation.members))
        await history.write()
        return True


def restart_line(
    run: RunState, failure: Failure, fault: Fault, go_on: GoOn, from_step: int, world: WorldPlan
) -> str:
    """Returns the line that announces a restart."""
    where = f"go on from step {from_step}" if from_step else "start again from the beginning"
    wait = f" in {go_on.wait_s:.0f} s" if go_on.wait_s >= 1 else ""
    others = "all ranks"
    if world.size != run.membership.wanted:
        others = f"{many(world.size, 'rank')} of {run.membership.wanted}"
    bad = "".join(f"; without node {node}: {why}" for node, why in run.membership.unused(world).items())
    if failure.kind == "taken in":
        return f"clipship: {fault.cause}: {others} {where}{bad}"
    who = rank_name(fault.rank, fault.node, failure.record.generation)
    what = fault.cause if failure.kind == "unfit" else f"{who}: {fault.cause}"
    return (
        f"clipship: {what}; restart {go_on.number} of {run.limits.max_restarts}{wait}: {others} {where}{bad}"
    )


def too_few(run: RunState) -> str:
    """Returns the reason why there is no next world."""
    its = run.membership
    key = "recovery.min_nodes" if run.limits.min_nodes is not None else "without recovery.min_nodes, the run"
    even = ", as many on each node (comm.fsdp.shard_degree)" if its.even_nodes else ""
    return (
        f"{many(len(its.living), 'supervisor')} of {len(its.expected)} "
        f"{'is' if len(its.living) == 1 else 'are'} left, and {key} needs {many(its.fewest, 'rank')}{even}"
    )
