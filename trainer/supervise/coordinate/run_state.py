"""State of a run that all parts of its coordinator share, and what the coordinator can ask of its supervisor.

The state decides which work goes on: what watches ranks is cancelled when there are none to watch, and all
work of the coordinator when the run has ended. So no part asks whether the run has ended meanwhile. No torch.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol, TypeVar

from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord
from trainer.run.generations import GenerationClaim
from trainer.run.layout import DIAGNOSIS_FILE, EXIT_FILE
from trainer.supervise.background import spawn
from trainer.supervise.coordinate.diagnosis import text
from trainer.supervise.coordinate.generation_state import Failure, GenerationState
from trainer.supervise.coordinate.membership import Membership, WorldPlan
from trainer.supervise.coordinate.states import BETWEEN, WITH_RANKS, Event, State, following
from trainer.supervise.limits import Limits
from trainer.supervise.machine import Machine, now
from trainer.supervise.messages import Message, Regroup
from trainer.supervise.restart_history import RestartHistory

_WATCH_S = 0.1
_AGAIN_S = 0.5
Answer = TypeVar("Answer")
Otherwise = TypeVar("Otherwise")


class Actions(Protocol):
    """Actions that the coordinator can ask of the supervisor that it is part of."""

    @property
    def can_restart(self) -> bool:
        """False if the supervisors cannot start their ranks again."""

    @property
    def can_claim(self) -> bool:
        """False if this supervisor has no others."""

    def broadcast(self, message: Message) -> None:
        """Sends a message to every supervisor, this one included."""

    def finish(self, record: ExitRecord) -> None:
        """Ends the run."""

    def steps_done(self) -> float:
        """Returns the last step that rank 0 has done in its present generation."""

    def has_begun(self) -> bool:
        """Returns whether rank 0, and so perhaps others, has done anything that could be saved."""

    def moments(self) -> Mapping[str, float]:
        """Returns the moments of its start that rank 0 has reached in its present generation."""

    def in_memory(self) -> int:
        """Returns the newest step that this node has kept in memory; 0 if there is none."""

    def say(self, line: str) -> None:
        """Shows a line to people."""

    async def fresh_variables(self) -> Mapping[str, str]:
        """Returns the variables by which the ranks of the next generation meet. Raises OSError."""

    async def claim(self, generation: int, world: str) -> GenerationClaim | None:
        """Claims the generation of that number for a world; returns None, or the claim that is in the way.

        Raises OSError if the run folder cannot be written.
        """

    def below(self, member: int) -> set[int]:
        """Returns the members whose way to this supervisor leads through that one."""

    async def is_gone(self, member: int) -> bool:
        """Returns whether a member's process has surely ended, since its machine refuses calls to it.

        It takes at most some seconds. False: it may live, or its machine is gone.
        """

    def forget(self, member: int) -> None:
        """Forgets the connection of a member that is lost."""

    def members_changed(self) -> None:
        """Is called when a member has come or gone; others may follow soon."""

    def generation_started(self) -> None:
        """Is called when a generation has started, whose first step may be lost a moment later."""

    def leave(self, reason: str) -> None:
        """Ends this supervisor, since others may go on, without a word in the run folder."""


class RunState:
    """State of the run at its coordinator; its parts share it."""

    def __init__(
        self,
        ranks: Sequence[int],
        limits: Limits,
        exit_files: ExitFiles,
        actions: Actions,
        membership: Membership | None = None,
        *,
        member: int = 0,
        keeps_going: bool = False,
        respawns: bool = False,
        starts_again: str = "",
        generation: int = 1,
        machine: Machine | None = None,
    ) -> None:
        """`ranks` are the members of this generation, in the order of ranks, and `member` is this one.

        `keeps_going`, `respawns` and `starts_again` say what the launcher does when a supervisor is gone, see
        `world`.
        """
        self.limits, self.exit_files, self.actions, self.member = limits, exit_files, actions, member
        self.machine = machine or Machine()
        self.wall_time = self.machine.wall_time
        self.membership = membership or Membership(ranks, len(ranks), len(ranks))
        self.post: Callable[[Message], None] = lambda message: None
        """Tells the coordinator, after what goes on just now, what a part of it has found."""
        self.keeps_going = keeps_going and limits.max_restarts > 0 and actions.can_claim
        """True if the launcher keeps the others when a supervisor is gone."""
        self.respawns = respawns
        """True if the launcher starts a lost supervisor again."""
        self.starts_again = starts_again if limits.max_restarts > 0 and not self.keeps_going else ""
        """When the launcher starts all supervisors again, see `world`; "": never."""
        self.history = RestartHistory(limits, exit_files, self.machine)
        self.generation = GenerationState(generation, tuple(ranks))
        """Present generation, or the next one while it is being agreed on."""
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

    def node_of(self, rank: int) -> str:
        """Returns the node of a rank of the present generation, "" if it is not known."""
        members = self.generation.members
        return self.membership.nodes.get(members[rank], "") if rank < len(members) else ""

    def steps_done(self) -> float:
        """Returns the number of the last step that rank 0 has done in its present generation."""
        return max(self.actions.steps_done(), self.generation.steps_done)

    def moments(self) -> Mapping[str, float]:
        """Returns the moments of rank 0's start in its present generation, on this process's clock."""
        return self.generation.moments or self.actions.moments()

    def present_step(self) -> int:
        """Returns the last step that is done, 0 if it is not known."""
        done = self.steps_done()
        return int(done) if done < float("inf") else 0

    def has_begun(self) -> bool:
        """Returns whether rank 0, and so perhaps others, has done anything that could be saved."""
        return self.actions.has_begun() or self.generation.begun

    def begin_generation(self) -> GenerationState:
        """Lets all ranks end: what is known about this generation is no longer of use to the next."""
        self.go(Event.RESTART)
        its = self.generation
        self.generation = GenerationState(its.number + 1, its.members)
        self.actions.broadcast(Regroup(self.generation.number))
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
        self.actions.leave(reason)

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
        self.actions.finish(record)

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
            run.actions.say(
                f"clipship: {run.limits.run_folder}: {why}; waiting up to {run.limits.init_s:.0f} s for it "
                "before the ranks start again"
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
