"""A supervisor's own rank: starts it in each generation, watches it, reports about it and ends it.

No torch.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from trainer.config.phases import NOTHING_DONE, SAVING
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from trainer.run.exit_record import ExitRecord
from trainer.run.layout import FLIGHT_RECORDS
from trainer.supervise import messages
from trainer.supervise.context import SupervisorContext
from trainer.supervise.coordinate.membership import Place, place_in
from trainer.supervise.machine import now
from trainer.supervise.rank.generation import RankOfGeneration
from trainer.supervise.rank.rank_report import (
    STOPPED_S,
    RankReport,
    StoppedRank,
)
from trainer.sysinfo.signals import signal_name
from trainer.text.wording import shortened
from trainer.world.heartbeat import RankState
from trainer.world.launchers import first_world, rank_variables
from trainer.world.learned_limits import LEARNED_LIMITS, to_text

_MOST_OF_REASON, _MOST_OF_DETAILS = 4_000, 40_000
"""Characters that travel of a failure: who gets a line of more than 1 MiB hangs up, and takes its sender for
lost. The rank's log has all of them."""


class OwnRank:
    """Rank of one supervisor, or none for now."""

    def __init__(
        self,
        context: SupervisorContext,
        generation: RankOfGeneration | None,
        start_rank: Callable[..., RankOfGeneration],
        on_late: Callable[[str, RankOfGeneration], None],
    ) -> None:
        """`start_rank` starts the rank of a generation, given its number, its environment and `is_root`.

        `on_late` is called when the rank has passed a limit, with the words for it.
        """
        self.generation = generation
        """The rank as it runs now; after a fault another one takes its place. None: there is none."""
        self._context, self._start_rank, self._on_late = context, start_rank, on_late
        world = context.world
        first = first_world(world, context.env)
        self.number = first.rank if first is not None else world.rank
        """Number of the rank in the present world; without a rank the number of this supervisor."""
        self.latest = world.generation
        """Highest number of a generation that this supervisor has heard of."""
        self.ran = world.generation
        """Number of the last generation that was started."""
        self.closed = False
        """True once this supervisor ends: then no rank is started any more."""
        self._told: messages.Progress | None = None
        """Progress that the coordinator knows of."""
        self._condemned: set[str] = set()
        self._pauses: list[tuple[float, float]] = []
        """Time at which this process went on after each pause, and the pause's length, both in seconds."""
        self._stopped = StoppedRank(now)
        self._learned: dict[str, str] = {}
        """Variable of the next generation's rank: the limits that the ranks so far have learned."""

    @property
    def is_idle(self) -> bool:
        """True if there is no rank, or if it is gone."""
        return self.generation is None or self.generation.ended

    @property
    def has_begun(self) -> bool:
        """True if the rank has done anything that could be saved."""
        return self.state().phase not in NOTHING_DONE

    @property
    def steps_done(self) -> int:
        """Last step that the rank has done; 0 if it has done none, or all."""
        done = self.state().steps_done
        return int(done) if done < float("inf") else 0

    def state(self) -> RankState:
        """Returns the rank's state; time when this process was suspended does not count.

        So a suspended job keeps the rest of its limits.
        """
        if self.generation is None:
            return RankState("init", float("inf"), 0, now(), 0, "", False, now=now())
        state = self.generation.state()
        return state if not self._pauses else state.resumed_after(self._paused_s)

    def _paused_s(self, since: float) -> float:
        return sum(min(pause, end - since) for end, pause in self._pauses if since < end)

    def moments(self) -> Mapping[str, float]:
        """Returns the moments of its start that the rank has reached in its present generation."""
        return self.generation.moments() if self.generation is not None else {}

    def record_pause(self, seconds: float) -> None:
        """Records that this process, and so its rank too, was suspended until now."""
        self._pauses.append((now(), seconds))
        self._stopped.forget()

    def request_stop(self) -> None:
        """Asks the rank to save and leave."""
        if self.generation is not None:
            self.generation.request_stop()

    def inspect(self, *, tells_progress: bool) -> None:
        """Checks whether the rank has ended, is stopped, or has passed a limit, and renews its lease.

        `tells_progress`: rank 0 tells the coordinator what it has done.
        """
        generation = self.generation
        if generation is None or generation.ending:
            return
        if tells_progress and self.number == 0:
            self._send_progress()
        code = generation.poll()
        if code is not None:
            if not generation.reported_end:
                generation.reported_end = True
                self._report_end(generation, code)
            return
        generation.look()
        if self._context.keeps_going:
            generation.renew_lease(self._context.limits.silence_s)
        if self._context.limits.max_restarts > 0 and self._stopped.is_lasting(
            generation.pid, is_stopped=generation.is_stopped
        ):
            if not generation.reported_end:
                generation.reported_end = True
                self._report_stopped(generation)
            return
        if self.number == 0 and self._context.limits.max_restarts > 0:
            self._send_condemned(generation)
        state = self.state()
        if state.late and not generation.reported_late:
            generation.reported_late = True
            what = f"{state.late_text} (noticed on rank {self.number})"
            self._context.send_up(messages.Late(generation.number, what))
            self._on_late(what, generation)
        generation.reported_late = state.late

    def _send_condemned(self, generation: RankOfGeneration) -> None:
        """Passes nodes that rank 0 has condemned on to the coordinator."""
        nodes = generation.condemned()
        for node in nodes.keys() - self._condemned:
            self._context.send_up(messages.BadNode(generation.number, node, nodes[node]))
        self._condemned |= nodes.keys()

    def _send_progress(self) -> None:
        """Tells a coordinator that has no heartbeat of its own about rank 0."""
        assert self.generation is not None
        state = self.state()
        progress = messages.Progress(
            self.generation.number, state.steps_done, state.phase not in NOTHING_DONE
        )
        if progress != self._told:
            self._told = progress
            ages = {name: round(now() - at, 2) for name, at in self.moments().items()}
            self._context.send_up(replace(progress, ages=ages))

    def _record(self, code: int, reason: str, details: str = "") -> ExitRecord:
        return ExitRecord(
            self.number, self._context.world.node, code, reason, self._context.machine.wall_time(), details
        )

    def _report_end(self, generation: RankOfGeneration, code: int) -> None:
        if code in (EXIT_DONE, EXIT_PREEMPTED):
            cause = generation.first_cause()
            reason = cause.reason if cause else ""
            self._context.send_up(messages.Done(generation.number, self.number, code, reason))
            return
        record = generation.first_cause() or self._record(EXIT_FAILED, "")
        if code < 0:
            record = self._killed(generation, -code)
        elif not record.reason:
            record = self._record(code, f"exited with code {code} in {self._where()}")
        self._send_failure(generation, record, waits=code > 0, killed=code == -signal.SIGKILL)

    def _report_stopped(self, generation: RankOfGeneration) -> None:
        """Reports a rank that no limit need pass for: it will do nothing until somebody wakes it."""
        reason = f"stopped by a signal in {self._where()}, for {STOPPED_S:.0f} s while its supervisor ran"
        self._send_failure(generation, self._record(EXIT_FAILED, reason), waits=False, killed=False)

    def _where(self) -> str:
        state = self.state()
        return f"{state.phase}, step {state.step}" if state.step else state.phase

    def _send_failure(
        self, generation: RankOfGeneration, record: ExitRecord, *, waits: bool, killed: bool
    ) -> None:
        state = self.state()
        record = replace(
            record,
            reason=shortened(record.reason, _MOST_OF_REASON),
            details=shortened(record.details, _MOST_OF_DETAILS),
        )
        self._context.send_up(
            messages.Failed(
                generation.number,
                record,
                step=state.step,
                saving=state.phase in SAVING,
                waiting=waits and state.waiting,
                killed=killed,
            )
        )

    def _killed(self, generation: RankOfGeneration, number: int) -> ExitRecord:
        ranks = self._context.world.local_size
        hint = f"; {generation.killed_hint(ranks)}" if number == signal.SIGKILL else ""
        return self._record(
            EXIT_FAILED, f"killed by {signal_name(number)} in {self._where()}{hint}", generation.last_stack()
        )

    async def end(self) -> None:
        """Kills the rank and all that it started, and waits until the kernel has ended it."""
        if self.generation is not None:
            await self.generation.end()

    async def end_before(self, following: int) -> None:
        """Ends the rank, and confirms it, so that the generation with the number `following` can start.

        That may have started meanwhile: then its rank is none of those that were to end.
        """
        if self.generation is not None and self.generation.number >= following:
            return
        await self.end()
        in_memory = self._context.machine.newest_kept(self._context.env)
        self._context.send_up(messages.Ended(following, self._context.world.rank, in_memory))

    async def choose_meeting(self) -> dict[str, str]:
        """Returns the variables by which the ranks of the next generation meet here. Raises OSError."""
        context = self._context
        return await context.machine.fresh_variables(context.env, context.address[0])

    async def answer_meeting(self, generation: int) -> None:
        """Chooses where the ranks of a generation meet whose rank 0 will be here."""
        try:
            answer = messages.Meeting(generation, await self.choose_meeting())
        except OSError as error:
            answer = messages.Meeting(generation, problem=str(error))
        self._context.send_up(answer)

    async def end_and_start(self, message: messages.Start) -> None:
        """Starts the rank that a message asks for, after the one that still runs has ended."""
        await self.end()
        self.start(message)

    def start(self, message: messages.Start) -> None:
        """Starts the rank again, if it has a place in the world of this generation."""
        number, variables = message.generation, dict(message.variables)
        if self.closed or number != self.latest:
            return
        if message.world:
            place = place_in(message.world, self._context.world.rank)
            self.number = self._context.world.rank if place is None else place.rank
            if place is None:
                self.generation = None
                return
            variables |= self._place_variables(place)
        try:
            if self.generation is not None and (state := self.generation.state()).ranks:
                self._learned = {LEARNED_LIMITS: to_text(state.learned, state.ranks)}
            own = {**self._context.env, **variables, **self._learned}
            self.generation = self._start_rank(number, env=own, is_root=self.number == 0)
        except OSError as error:
            record = self._record(EXIT_FAILED, f"the rank cannot be started again: {error}")
            self._context.send_up(messages.Failed(number, record))
            return
        self.generation.limit_init(self._context.limits.init_s)
        self.inspect(tells_progress=False)  # it gives it a lease: this supervisor may be stopped just now

    def _place_variables(self, place: Place) -> dict[str, str]:
        world = replace(
            self._context.world,
            rank=place.rank,
            size=place.size,
            local_rank=place.local_rank,
            local_size=place.local_size,
        )
        return rank_variables(world, place.cross, self._context.env)

    def report(self) -> RankReport | None:
        """Returns what the rank does now; None if there is none."""
        its = self.generation
        return None if its is None else its.report(self.number, self._context.world.node, self.state())

    async def send_report(self, generation: RankOfGeneration) -> None:
        """Sends this rank's report. NCCL's flight record is saved first, since the end may follow at once."""
        own = generation.report(self.number, self._context.world.node, self.state())
        if folder := self._context.limits.run_folder:
            await generation.save_flight_record(Path(folder, FLIGHT_RECORDS))
        self._context.send_up(messages.Report(generation.number, own))

    async def send_stack(self, generation: RankOfGeneration) -> None:
        """Sends the Python stack of this rank."""
        rank = self.number
        stack = await generation.python_stack()
        self._context.send_up(messages.Stack(generation.number, rank, stack))
