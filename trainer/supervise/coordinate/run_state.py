"""State of a run that all parts of its coordinator share.

The state decides which work goes on: what watches ranks is cancelled when there are none to watch, and all
work of the coordinator when the run has ended. So no part asks whether the run has ended meanwhile. No torch.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from trainer.errors import EXIT_DONE, EXIT_START_AGAIN
from trainer.run.exit_record import ExitRecord
from trainer.run.generations import GenerationClaim
from trainer.run.layout import DIAGNOSIS_FILE, EXIT_FILE
from trainer.supervise.background import spawn
from trainer.supervise.context import SupervisorContext
from trainer.supervise.coordinate.diagnosis import text
from trainer.supervise.coordinate.generation_state import Failure, GenerationState
from trainer.supervise.coordinate.membership import Membership, WorldPlan
from trainer.supervise.coordinate.states import BETWEEN, WITH_RANKS, Event, State, following
from trainer.supervise.ending import Ending
from trainer.supervise.machine import now
from trainer.supervise.messages import End, Message, Regroup
from trainer.supervise.rank.own_rank import OwnRank
from trainer.supervise.restart_history import RestartHistory
from trainer.world.variables import RESPAWNS, STARTS_AGAIN

_WATCH_S = 0.1
_AGAIN_S = 0.5
Answer = TypeVar("Answer")
Otherwise = TypeVar("Otherwise")


class RunState:
    """State of the run at its coordinator; its parts share it."""

    def __init__(
        self,
        context: SupervisorContext,
        own: OwnRank,
        ending: Ending,
        broadcast: Callable[[Message], None],
        membership: Membership,
        ranks: Sequence[int],
    ) -> None:
        """`ranks` are the members of this generation, in the order of ranks.

        `own`, `ending` and `context` are those of the supervisor of which the coordinator is a part.
        `broadcast` sends a message to every supervisor, this one included.
        """
        self.context, self.limits, self.exit_files = context, context.limits, context.exit_files
        self.own, self.broadcast, self.membership = own, broadcast, membership
        self._ending = ending
        self.member, self.keeps_going = context.world.rank, context.keeps_going
        self.say, self.wall_time = context.machine.say, context.machine.wall_time
        self.post: Callable[[Message], None] = lambda message: None
        """Tells the coordinator, after what goes on just now, what a part of it has found."""
        self.respawns = bool(context.env.get(RESPAWNS))
        """True if the launcher starts a lost supervisor again."""
        may_start_again = self.limits.max_restarts > 0 and not self.keeps_going
        self.starts_again = context.env.get(STARTS_AGAIN, "") if may_start_again else ""
        """When the launcher starts all supervisors again, see `world`; "": never."""
        self.history = RestartHistory(self.limits, self.exit_files, context.machine)
        self.generation = GenerationState(context.world.generation, tuple(ranks))
        """Present generation, or the next one while it is being agreed on."""
        self.ran = self.generation.number
        """Number of the last generation that was started."""
        self.stop_at: float | None = None
        """Time of the first request to stop; None if there was none."""
        self._state = State.STARTING
        self._watching: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lasting: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> State:
        """State of the run; its row in `states` says what the coordinator waits for."""
        return self._state

    def go(self, event: Event) -> None:
        """Goes to the state to which the event leads, and cancels the work that ends there.

        Raises IllegalEvent if the table does not have it.
        """
        self._state = following(self._state, event)
        if self._state not in WITH_RANKS:
            _cancel(self._watching)
        if self._state is State.ENDED:
            _cancel(self._tasks)

    def watch(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs the work as long as ranks run."""
        spawn(work, self._watching)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs the work until the run has ended."""
        return spawn(work, self._tasks)

    def spawn_lasting(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work with files that must be done even if the run ends meanwhile."""
        spawn(work, self._lasting)

    def close(self) -> None:
        """Ends all work, also that with files."""
        if self._state is not State.ENDED:
            self.go(Event.CUT_OFF)
        _cancel(self._lasting)

    @property
    def reaches_all(self) -> bool:
        """True if all ranks are supervised from here: only those can be started again."""
        return self.context.tree is not None or self.context.world.size == 1

    @property
    def is_between(self) -> bool:
        """True between two generations, when no rank may run."""
        return self._state in BETWEEN

    @property
    def has_ranks(self) -> bool:
        """True while ranks run and are watched."""
        return self._state in WITH_RANKS

    @property
    def world(self) -> WorldPlan:
        """World of the present generation."""
        nodes = self.membership.nodes
        return WorldPlan(tuple((member, nodes.get(member, "")) for member in self.generation.members))

    @property
    def members(self) -> tuple[tuple[int, str], ...]:
        """All members who are there, each with its node."""
        return tuple((member, self.membership.nodes[member]) for member in self.membership.living)

    def node_of(self, rank: int) -> str:
        """Returns the node of a rank of the present generation, "" if it is not known."""
        members = self.generation.members
        return self.membership.nodes.get(members[rank], "") if rank < len(members) else ""

    def steps_done(self) -> float:
        """Returns the number of the last step that rank 0 has done in its present generation."""
        return max(self.own.state().steps_done, self.generation.steps_done)

    def moments(self) -> Mapping[str, float]:
        """Returns the moments of rank 0's start in its present generation, on this process's clock."""
        return self.generation.moments or self.own.moments()

    def in_memory(self) -> int:
        """Returns the newest step that this node has kept in memory; 0 if there is none."""
        return self.context.machine.newest_kept(self.context.env)

    def present_step(self) -> int:
        """Returns the last step that is done, 0 if it is not known."""
        done = self.steps_done()
        return int(done) if done < float("inf") else 0

    def has_begun(self) -> bool:
        """Returns whether rank 0, and so perhaps others, has done anything that could be saved."""
        return self.own.has_begun or self.generation.begun

    def begin_generation(self) -> GenerationState:
        """Lets all ranks end: what is known about this generation is no longer of use to the next."""
        self.go(Event.RESTART)
        its = self.generation
        self.generation = GenerationState(its.number + 1, its.members)
        self.broadcast(Regroup(self.generation.number))
        return self.generation

    async def watch_progress(self) -> None:
        """Waits for the first new step of a generation, and records how long the restart has taken."""
        while self.steps_done() <= self.history.reached:
            await asyncio.sleep(_WATCH_S)  # it stands in shared memory, which wakes nobody
        self.go(Event.STEP)
        if self.history.clock is not None:
            self.history.record_new_step(self.moments())
            await self.history.write()

    def leave(self, reason: str) -> None:
        """Leaves the run to another part of a cut network, or to another start."""
        self.go(Event.CUT_OFF)
        self._ending.leave(reason)

    def end(self, record: ExitRecord) -> None:
        """Ends the run with this record."""
        self.go(Event.END)
        generation = record.generation or self.generation.number
        left_out = tuple(sorted(self.membership.excluded))
        restarts = self.history.summaries()
        its = replace(record, restarts=restarts, generation=generation, left_out=left_out)
        self.spawn_lasting(self._end(its))

    async def end_failed(self, failure: Failure, why_no_restart: str = "") -> None:
        """Ends the run because of a failure."""
        record = failure.record
        if why_no_restart:
            record = replace(record, reason=f"{record.reason}; {why_no_restart}")
        if failure.diagnosis is not None:
            stacks = self.generation.stacks
            diagnosis = {
                "generation": record.generation,
                **failure.diagnosis.to_json(record.exit_code, stacks),
                "nccl_ras": failure.ras,
            }
            file = await self.exit_files.write(DIAGNOSIS_FILE, diagnosis)
            record = replace(record, details=text(failure.diagnosis, stacks, file))
        self.end(record)

    async def _end(self, record: ExitRecord) -> None:
        # The files are first: a launcher that sees a rank end may kill this process within half a second.
        if self.history:
            await self.history.write()
        await self.exit_files.write(EXIT_FILE, asdict(record))
        self.finish(record)

    def finish(self, record: ExitRecord) -> None:
        """Ends all supervisors, each with the cause's exit code, so that no launcher can choose another."""
        if record.exit_code not in (EXIT_DONE, EXIT_START_AGAIN):
            self._ending.show(record)
        self.broadcast(End(record.exit_code))

    async def claim(self, generation: int, world: str) -> GenerationClaim | None:
        """Claims a generation for a world; returns None, or the claim that is in the way.

        Raises OSError if the run folder cannot be written.
        """
        return await self.exit_files.claim(self._own_claim(generation, world))

    async def announce(self, generation: int) -> None:
        """Tells one that comes back where it finds this coordinator, which waits for it."""
        await self.exit_files.announce(self._own_claim(generation, ""))

    def _own_claim(self, generation: int, world: str) -> GenerationClaim:
        node, (host, port) = self.context.world.node, self.context.address
        return GenerationClaim(self.exit_files.start, generation, self.member, node, host, port, world)

    async def until(self, arrived: Callable[[], bool], timeout_s: float) -> None:
        """Waits until `arrived`, but no longer than the timeout."""
        deadline = now() + timeout_s
        # Many messages, in any order, may make it true; looking again is simpler than an event in each.
        while not arrived() and now() < deadline:
            await asyncio.sleep(0.05)


class StorageRetry:
    """Allows a run folder that does not answer the time that a start has, `timeouts.init_s`."""

    def __init__(self, run: RunState) -> None:
        self._run, self._until = run, now() + run.limits.init_s
        self._told = ""

    async def lasts(self, error: OSError) -> bool:
        """Waits a moment; returns whether to try again after this error, which is told unless it was told."""
        run = self._run
        if not run.limits.run_folder or now() >= self._until:
            return False
        if self._told != (why := error.strerror or str(error)):
            self._told = why
            run.say(
                f"clipship: {run.limits.run_folder}: {why}; waiting up to {run.limits.init_s:.0f} s for it"
            )
        await asyncio.sleep(_AGAIN_S)  # a file server that fails over answers after some seconds
        return True

    async def answer(self, ask: Callable[[], Awaitable[Answer]], otherwise: Otherwise) -> Answer | Otherwise:
        """Returns the answer to a question that raises OSError if the folder does not answer."""
        while True:
            try:
                return await ask()
            except OSError as error:
                if not await self.lasts(error):
                    return otherwise


def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    """Cancels the tasks, without the one that runs now: it has made the transition, and comes to its end."""
    for task in tasks - {asyncio.current_task()}:
        task.cancel()
