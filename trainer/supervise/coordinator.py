"""The coordinator: collects messages from all supervisors and decides how the run ends, or goes on.

It is part of rank 0's supervisor; if that is lost, another one's coordinator takes over. No torch, no
sockets. Supervisors send `joined`, `done`, `failed`, `late`, `lost`, `cut`, `stop`, `report`, `stack`,
`ended`, `meeting`, `progress` and `condemn`; the coordinator sends `stop`, `collect`, `stacks`, `regroup`,
`meet`, `start` and `end` to all of them. Messages about a rank carry the generation that it belongs to; those
about an earlier one are dropped. In messages about a supervisor, `rank` is its number, see `membership`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainer.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_START_AGAIN,
    EXIT_TIMED_OUT,
)
from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord, rank_name, supervisor_lost
from trainer.run.generations import GenerationClaim
from trainer.run.layout import DIAGNOSIS_FILE, EXIT_FILE
from trainer.supervise.diagnosis import Diagnosis, Missing, cut_off, text
from trainer.supervise.limits import Limits
from trainer.supervise.membership import Membership, WorldPlan
from trainer.supervise.nccl_debug import ras_status
from trainer.supervise.rank_report import STACK_WAIT_S, RankReport
from trainer.supervise.restart_parts import RestartClock
from trainer.supervise.restarts import (
    Fault,
    GiveUp,
    GoOn,
    Kind,
    Restart,
    RestartPolicy,
    restart_from_json,
)
from trainer.text.wording import many

Message = dict[str, Any]

SETTLE_S = 0.4
"""Seconds between the first report of a failure and the decision.

Failures that follow from the first one may be reported before it.
"""
ANSWER_S = 4.0
"""Longest wait, in seconds, for every supervisor to report what its rank does."""
REPEAT_S = 5.0
"""Signals within this many seconds of the first are one request: launchers and schedulers send several."""
REGROUP_S = 30.0
"""Longest wait, in seconds, for every supervisor to confirm that its rank has ended before a restart."""
ORPHANS_S = 4.0
"""Longest wait, in seconds, for a supervisor to find another way after the one above it is gone."""
FENCE_S = 3.0
"""Seconds from the silence of a supervisor until its rank has surely been ended by itself.

Both sides of a connection wait for `timeouts.silence_s`, and each looks once a second.
"""
GROW_S = 3.0
"""Wait, in seconds, for others to come back before the ranks start again because one did."""
_WATCH_S = 0.1
_KILLED = -1.0
"""Weight of a rank's death by SIGKILL among causes; the lightest is the first cause."""
_STACKS = 16
_DETAILS = 4000
"""Characters of a fault's details that are kept with its restart."""


@dataclass(frozen=True)
class Actions:
    """Actions that the coordinator can ask of rank 0's supervisor."""

    broadcast: Callable[[Message], None]
    """Sends a message to every supervisor, this one included."""
    finish: Callable[[ExitRecord], None]
    """Ends the run."""
    steps_done: Callable[[], float] = lambda: 1.0
    """Returns the number of the last step that rank 0 has done in its present generation."""
    has_begun: Callable[[], bool] = lambda: True
    """Returns whether rank 0, and so perhaps others, has done anything that could be saved."""
    say: Callable[[str], None] = lambda line: None
    """Shows a line to people."""
    fresh_variables: Callable[[], Awaitable[Mapping[str, str]]] | None = None
    """Returns the variables by which the ranks of the next generation meet. Raises OSError.

    None: the supervisors cannot start their ranks again.
    """
    moments: Callable[[], Mapping[str, float]] = dict
    """Returns the moments of its start that rank 0 has reached in its present generation."""
    in_memory: Callable[[], int] = lambda: 0
    """Returns the newest step that this node has kept in memory; 0 if there is none."""
    claim: Callable[[int], Awaitable[GenerationClaim | None]] | None = None
    """Claims the generation of that number; returns None, or the claim that is in the way."""
    below: Callable[[int], set[int]] = lambda member: set()
    """Returns the members whose way to this supervisor leads through that one."""
    forget: Callable[[int], None] = lambda member: None
    """Forgets the connection of a member that is lost."""
    members_changed: Callable[[], None] = lambda: None
    """Is called when a member has come or gone, or when a generation has started."""
    leave: Callable[[str], None] = lambda other: None
    """Ends this supervisor as cut off from the others, without a word in the run folder."""


@dataclass(frozen=True)
class _Failure:
    """Failure of a rank that would end the run."""

    record: ExitRecord
    step: int = 0
    """Step that the rank was working on."""
    diagnosis: Diagnosis | None = None
    """State of all ranks if a limit passed; it is written to the run folder when the run ends."""
    ras: str = ""
    others_there: bool = True
    """False if a supervisor is gone or does not answer."""
    kind: Kind = "fault"
    silent: tuple[int, ...] = ()
    """Members that do not answer."""
    at: float = field(default_factory=time.monotonic)


@dataclass
class _Round:
    """All that the coordinator learns about one generation; the next generation gets a new one."""

    generation: int
    members: tuple[int, ...] = ()
    """Members in the order of ranks; before the start those of the generation before."""
    started: bool = True
    """False until every supervisor may start its rank of this generation."""
    ended: set[int] = field(default_factory=set)
    """Members that have no rank of the generation before any more."""
    in_memory: int = 0
    """Newest step that any node of them has kept in memory; 0 if none has."""
    meeting: Message | None = None
    """Answer of rank 0's supervisor: variables by which the ranks meet, or the problem."""
    regrouped_again: bool = False
    progress: Message = field(default_factory=dict)
    """State of rank 0 as its supervisor tells it, if that is not this one."""
    growing: bool = False
    """True once the ranks were asked to save and leave, so that more of them can start."""
    done: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    causes: list[tuple[float, _Failure]] = field(default_factory=list)
    reports: dict[int, RankReport] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    collecting: bool = False
    failed: bool = False
    """True once a failure is being decided about."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


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
        self.limits, self._exit_files, self._actions = limits, exit_files, actions
        self._member = member
        self._membership = membership or Membership(ranks, len(ranks), len(ranks))
        self._keeps_going = keeps_going and limits.max_restarts > 0 and actions.claim is not None
        self._respawns = respawns
        self._starts_again = starts_again if limits.max_restarts > 0 and not self._keeps_going else ""
        self._orphans: set[int] = set()
        """Members that are looking for another way to this supervisor."""
        self._ran = generation
        """Last generation that has run here."""
        self._claimed: list[int] = []
        """Numbers of generations that this coordinator has claimed, or passed over, since then."""
        self._awaited: set[int] = set()
        """Members of an earlier coordinator that have not come yet."""
        self._joined_at = 0.0
        self._doubtful: dict[int, float] = {}
        """Members that may live beyond a cut in the network, and when they fell silent."""
        self._policy = RestartPolicy(limits.max_restarts, limits.same_fault_limit, limits.backoff_s)
        self._restarts: list[Restart] = []
        self._clock: RestartClock | None = None
        """Clock of the restart under way; None if there is none."""
        self._reached = 0.0
        """Last step that any generation has done."""
        self._round = _Round(generation, tuple(ranks))
        self._others_there = True
        self._stop_at: float | None = None
        self._decided = False
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, message: Message) -> None:
        """Handles one message from another supervisor or from rank 0's own."""
        handler = getattr(self, f"_on_{message['kind']}", None)
        outdated = message.get("generation", self._round.generation) != self._round.generation
        if handler is not None and not self._decided and not outdated:
            handler(message)

    @property
    def state(self) -> tuple[int, WorldPlan, tuple[tuple[int, str], ...]]:
        """Number and world of the present generation, and all members who are there, each with its node."""
        nodes = self._membership.nodes
        world = WorldPlan(tuple((member, nodes.get(member, "")) for member in self._round.members))
        return (
            self._round.generation,
            world,
            tuple((member, nodes[member]) for member in self._membership.living),
        )

    def _on_joined(self, message: Message) -> None:
        """Records a supervisor; `idle` means that it has no rank."""
        member, its = message["rank"], self._round
        self._membership.join(member, message["node"])
        self._orphans.discard(member)
        self._awaited.discard(member)
        self._joined_at = time.monotonic()
        self._doubtful.pop(member, None)
        self._actions.members_changed()
        if self._keeps_going:
            self._place_newcomer(member, its, idle=bool(message.get("idle")))
        if self._stop_at is not None:
            self._pass_on_stop()

    def _place_newcomer(self, member: int, its: _Round, *, idle: bool) -> None:
        if not its.started:
            if idle:
                its.ended.add(member)
            else:
                self._spawn(self._regroup_again(its), its.tasks)
        elif idle and member in its.members:
            reason = supervisor_lost("it has lost its rank and come back")
            node = self._membership.nodes[member]
            record = ExitRecord(its.members.index(member), node, EXIT_FAILED, reason, time.time())
            self._record_cause(1.0, _Failure(record, self._present_step(), kind="lost"))
        elif idle:
            self._spawn(self._grow(its), its.tasks)

    async def _regroup_again(self, its: _Round) -> None:
        """Tells a supervisor that was not there when the others were told to end their ranks."""
        await asyncio.sleep(0.2)
        if self._round is its and not its.started and not its.regrouped_again:
            its.regrouped_again = True
            self._actions.broadcast({"kind": "regroup", "generation": its.generation})
            await asyncio.sleep(0.2)
            its.regrouped_again = False

    async def _grow(self, its: _Round) -> None:
        """Lets the ranks save and leave if more of them can start, since members have come back."""
        await asyncio.sleep(GROW_S)
        world = self._membership.next_world()
        if world is None or world.size <= len(its.members) or its.growing or self._stop_at is not None:
            return
        its.growing = True
        self._actions.broadcast({"kind": "stop"})

    async def _take_in(self) -> None:
        """Starts the ranks again after they have saved: this is no fault, and no step is done again."""
        nodes = self._membership.nodes
        new = [member for member in self._membership.living if member not in self._round.members]
        member = new[0] if new else self._member
        cause = f"{many(len(new), 'supervisor')} came back"
        fault = Fault(member, nodes[member], 0, cause)
        record = ExitRecord(member, nodes[member], EXIT_FAILED, cause, time.time())
        await self._restart(_Failure(record, kind="taken in"), fault, GoOn(0, 0.0))

    def _on_condemn(self, message: Message) -> None:
        """Leaves a node out from the next generation on, if the others make a world that is as large."""
        self._membership.condemn(message["node"], message["why"])

    def _on_done(self, message: Message) -> None:
        its = self._round
        its.done[message["rank"]] = message["code"]
        its.reasons[message["rank"]] = message.get("reason", "")
        if len(its.done) == 1:
            self._spawn(self._all_done_in_time(), its.tasks)
        if len(its.done) == len(its.members):
            self._end_done()

    async def _all_done_in_time(self) -> None:
        """Waits `shutdown_s` for all ranks to end after the first.

        Ranks leave together, after a barrier, so one that stays behind is stuck in its clean-up.
        """
        await asyncio.sleep(self.limits.shutdown_s)
        done = self._round.done
        # If the ranks were preempted, the state is saved and the reason known, so no diagnosis is needed.
        if EXIT_PREEMPTED in done.values():
            self._end_done()
        else:
            await self._collect(
                f"{len(done)} of {len(self._round.members)} ranks are done; the others did not end within "
                f"timeouts.shutdown_s = {self.limits.shutdown_s:g} s"
            )

    def _end_done(self) -> None:
        done = self._round.done
        code = max(done.values())
        if code == EXIT_PREEMPTED and self._round.growing and self._stop_at is None:
            if not self._round.failed:
                self._round.failed = True
                self._spawn(self._take_in())
            return
        rank = min(rank for rank, other_code in done.items() if other_code == code)
        reason = self._round.reasons[rank] or ("asked to stop" if code == EXIT_PREEMPTED else "done")
        if code == EXIT_DONE:
            self._record_new_step()  # the last one may be too short a while ago to have been seen
        self._decide(ExitRecord(rank, self._node_of(rank), code, reason, time.time()))

    def _on_failed(self, message: Message) -> None:
        """Records a failure.

        With `waiting`, the rank failed inside a collective, so probably because another rank had ended. With
        `killed`, it got SIGKILL, which never follows from another rank's failure.
        """
        record = replace(ExitRecord(**message["record"]), generation=self._round.generation)
        failure = _Failure(record, message.get("step", 0))
        self._record_cause(_KILLED if message.get("killed") else 2.0 if message["waiting"] else 0.0, failure)

    def _on_lost(self, message: Message) -> None:
        """Records that a supervisor is gone; `silent` means that it may still live beyond a cut."""
        rank, node = message["rank"], message["node"]
        reason = supervisor_lost(message["reason"])
        self._record_lost(rank, node, reason, silent=bool(message.get("silent")))

    def _on_cut(self, message: Message) -> None:
        """Records a supervisor that reports itself as cut off.

        It cannot reach a neighbour, which may be well on the other side.
        """
        if self._keeps_going and message["rank"] == self._member:
            self._decided = True
            self._actions.leave(message["other"])
            return
        self._record_lost(message["rank"], message["node"], cut_off(message["other"]), silent=True)

    def _record_lost(self, member: int, node: str, reason: str, *, silent: bool) -> None:
        """Records that a supervisor is gone."""
        its = self._round
        rank = its.members.index(member) if member in its.members else member
        record = ExitRecord(rank, node, EXIT_FAILED, reason, time.time(), generation=its.generation)
        if not self._keeps_going:
            self._others_there = False
            if its.started:
                step = self._present_step() if self._starts_again else 0
                self._record_cause(1.0, _Failure(record, step, others_there=False, kind="lost"))
            elif not self._starts_again:
                self._decide(record)
            return
        self._lose(member, silent=silent)
        if its.started and member in its.members:
            self._record_cause(1.0, _Failure(record, self._present_step(), kind="lost"))
        elif its.started:
            self._actions.say(f"clipship: supervisor {member} on {node}, which has no rank: {reason}")

    def _lose(self, member: int, *, silent: bool) -> None:
        """Counts a member as gone. Those below it in the tree have ORPHANS_S to find another way."""
        orphans = {other for other in self._actions.below(member) if other in self._membership.living}
        self._membership.lose(member)
        self._orphans.discard(member)
        self._actions.forget(member)
        if silent:
            self._doubtful[member] = time.monotonic()
        if orphans := orphans - self._orphans:
            self._orphans |= orphans
            self._spawn(self._lose_orphans(orphans, silent=silent))
        self._actions.members_changed()

    async def _lose_orphans(self, orphans: set[int], *, silent: bool) -> None:
        self._joined_at = time.monotonic()
        while orphans & self._orphans and time.monotonic() < self._joined_at + ORPHANS_S:
            await asyncio.sleep(0.1)  # in a large run they come one after the other
        for member in sorted(orphans & self._orphans):
            reason = supervisor_lost("it has not come back since the supervisor above it was lost")
            self._record_lost(member, self._membership.nodes[member], reason, silent=silent)

    def _present_step(self) -> int:
        """Returns the last step that is done, 0 if it is not known."""
        done = self._steps_done()
        return int(done) if done < float("inf") else 0

    def _steps_done(self) -> float:
        return max(self._actions.steps_done(), float(self._round.progress.get("steps_done", 0.0)))

    def _has_begun(self) -> bool:
        return self._actions.has_begun() or bool(self._round.progress.get("begun"))

    def _on_progress(self, message: Message) -> None:
        self._round.progress = message

    def _node_of(self, rank: int) -> str:
        members = self._round.members
        return self._membership.nodes.get(members[rank], "") if rank < len(members) else ""

    def _record_cause(self, weight: float, failure: _Failure) -> None:
        its = self._round
        its.causes.append((weight, failure))
        if len(its.causes) == 1 and self._may_start_again(failure) and self._can_go_on(failure):
            # MPI leaves half a second until it kills all
            self._spawn(self._exit_files.request_start(failure.record, its.generation + 1))
        if len(its.causes) == 1 and not its.collecting:
            self._spawn(self._decide_on_first_cause(), its.tasks)

    async def _decide_on_first_cause(self) -> None:
        causes = self._round.causes
        # Nothing comes before a kill, so there is nothing to wait for.
        await self._until(lambda: any(weight == _KILLED for weight, _ in causes), SETTLE_S)
        self._fail(min(self._round.causes, key=lambda cause: (cause[0], cause[1].record.time))[1])

    def _on_late(self, message: Message) -> None:
        self._spawn(self._collect(message["what"]), self._round.tasks)

    def _on_stop(self, message: Message) -> None:
        """Asks the ranks to save and leave on the first request.

        A request more than REPEAT_S later, or one marked `again`, ends the run at once.
        """
        if self._starts_again and (self._round.causes or not self._round.started):
            return  # MPI signals all others when one has failed
        if self._stop_at is None:
            self._stop_at = time.monotonic()
            self._spawn(self._stopped_in_time())
            self._pass_on_stop()
        elif message.get("again") or time.monotonic() - self._stop_at > REPEAT_S:
            reason = f"a second signal ({message['signal']}) ended the run at once, without saving"
            self._decide(
                ExitRecord(message["rank"], message["node"], 128 + message["signal"], reason, time.time())
            )

    def _pass_on_stop(self) -> None:
        """Passes the request to stop to all.

        Before the first step is done there is nothing to save: once every supervisor has joined, all leave at
        once. Between two generations there are no ranks, and all leave at once too.
        """
        if not self._round.started:
            self._leave_early(
                "asked to stop during a restart of the ranks; the run can go on from its checkpoint"
            )
        elif set(self._round.members) <= self._membership.nodes.keys() and not self._has_begun():
            self._leave_early("asked to stop before there was anything to save; the run can be started again")
        else:
            self._actions.broadcast({"kind": "stop"})

    def _leave_early(self, reason: str) -> None:
        self._decide(ExitRecord(0, self._node_of(0), EXIT_PREEMPTED, reason, time.time()))

    async def _stopped_in_time(self) -> None:
        limit = self.limits.checkpoint_s + self.limits.shutdown_s
        await asyncio.sleep(limit)
        await self._collect(
            f"the run was asked to stop and had not ended after {limit:g} s "
            "(timeouts.checkpoint_s + timeouts.shutdown_s)"
        )

    async def _collect(self, what: str) -> None:
        """Collects reports from all ranks and stacks from late ones; decides even if some do not answer."""
        its = self._round
        if its.collecting or self._decided:
            return
        its.collecting, at = True, time.monotonic()
        self._actions.broadcast({"kind": "collect"})
        await self._until(lambda: len(its.reports) == len(its.members), ANSWER_S)
        reports = [its.reports[rank] for rank in sorted(its.reports)]
        missing = [
            Missing(rank, self._node_of(rank)) for rank in range(len(its.members)) if rank not in its.reports
        ]
        diagnosis = Diagnosis(what, reports, missing)
        late = [report.rank for report in diagnosis.late][:_STACKS]
        waiting = [report.rank for report in reports if report.rank not in late][:1]
        self._actions.broadcast({"kind": "stacks", "ranks": late + waiting})
        await self._until(lambda: {*late, *waiting} <= its.stacks.keys(), STACK_WAIT_S + 1.0)
        self._fail(self._timed_out(diagnosis, await ras_status(), at))

    def _timed_out(self, diagnosis: Diagnosis, ras: str, at: float) -> _Failure:
        rank, node = next(iter(diagnosis.late_or_missing()), (0, self._node_of(0)))
        step = next((report.step for report in diagnosis.reports if report.rank == rank), 0)
        details = text(diagnosis, self._round.stacks, "")
        reason = f"timed out: {diagnosis.what}"
        record = ExitRecord(
            rank, node, EXIT_TIMED_OUT, reason, time.time(), details, generation=self._round.generation
        )
        silent = tuple(self._round.members[missing.rank] for missing in diagnosis.missing)
        return _Failure(record, step, diagnosis, ras, others_there=not silent, silent=silent, at=at)

    def _on_report(self, message: Message) -> None:
        report = RankReport(**message["report"])
        self._round.reports[report.rank] = report

    def _on_stack(self, message: Message) -> None:
        self._round.stacks[message["rank"]] = message["stack"]

    def _on_ended(self, message: Message) -> None:
        member = message["rank"]
        self._round.ended.add(member)
        self._round.in_memory = max(self._round.in_memory, message.get("in_memory", 0))
        if member in self._membership.lost:  # it was only late
            self._membership.join(member, self._membership.nodes[member])

    def _on_meeting(self, message: Message) -> None:
        self._round.meeting = message

    def _fail(self, failure: _Failure) -> None:
        """Lets the run go on after a failure, or ends it; of several failures the first counts."""
        if not self._round.failed and not self._decided:
            self._round.failed = True
            self._spawn(self._go_on_or_end(failure))

    async def _go_on_or_end(self, failure: _Failure) -> None:
        if not self._can_go_on(failure):
            await self._end_failed(failure)
            return
        record = failure.record
        cause = record.reason.partition("; ")[0]
        fault = Fault(record.rank, record.node, failure.step, cause, lost=failure.kind == "lost")
        self._membership.record_fault(record.node)
        new_step = self._steps_done() > self._reached
        answer = self._policy.decide(
            fault, await self._exit_files.newest_checkpoint() or 0, new_step=new_step
        )
        if isinstance(answer, GiveUp):
            await self._end_failed(failure, answer.reason)
        elif not self._can_go_on(failure):  # a stop or a lost supervisor came while the folder was read
            await self._end_failed(failure)
        elif self._may_start_again(failure):
            await self._let_start_again(failure, fault, answer)
        else:
            await self._restart(failure, fault, answer)

    def _may_start_again(self, failure: _Failure) -> bool:
        """Returns whether a restart after this failure needs the launcher."""
        return self._starts_again == "always" or bool(self._starts_again and not failure.others_there)

    async def _let_start_again(self, failure: _Failure, fault: Fault, go_on: GoOn) -> None:
        """Lets all supervisors leave, so that the launcher starts them again as the next generation."""
        its = self._begin_round()
        nodes = self._membership.nodes
        world = WorldPlan(tuple((member, nodes.get(member, "")) for member in its.members))
        from_step = max(await self._exit_files.newest_checkpoint() or 0, self._actions.in_memory())
        self._actions.say(self._line(failure, fault, go_on, from_step, world))
        at = round(time.time() - (time.monotonic() - failure.at), 3)
        restart = Restart(
            its.generation,
            fault.cause,
            fault.rank,
            fault.node,
            fault.step,
            from_step,
            time=at,
            ranks=world.size,
        )
        details = failure.record.details[:_DETAILS]
        self._restarts.append(replace(restart, kind=failure.kind, details=details))
        await self._write_restarts()
        await self._exit_files.request_start(failure.record, its.generation)
        if failure.others_there:
            await self._until(lambda: self._decided or its.ended >= set(its.members), ANSWER_S)
        await self._until(lambda: self._decided, go_on.wait_s)
        if not self._decided:
            self._decided = True
            self._actions.finish(replace(failure.record, exit_code=EXIT_START_AGAIN))

    async def resume(self) -> None:
        """Goes on where the last generation's coordinator left off; the launcher has started all again.

        If that one was lost, the fault is counted here.
        """
        self._restarts = [restart_from_json(row) for row in await self._exit_files.restarts()]
        self._policy.restore(self._restarts)
        for each in self._restarts:
            self._membership.record_fault(each.node)
        generation = self._round.generation
        if not self._restarts or self._restarts[-1].generation < generation:
            record = await self._exit_files.requested_start()
            if record is not None and not await self._count_lost(record, generation):
                return
        self._reached = float(max((each.step for each in self._restarts), default=1) - 1)
        if self._restarts:
            seconds_ago = max(0.0, time.time() - self._restarts[-1].time)
            self._clock = RestartClock(time.monotonic() - seconds_ago)
            self._spawn(self._watch_progress(self._round))

    async def _count_lost(self, record: ExitRecord, generation: int) -> bool:
        """Counts a fault that nobody has recorded; returns False if the run ends because of it."""
        cause = record.reason.partition("; ")[0]
        saved_step = await self._exit_files.newest_checkpoint() or 0
        answer = self._policy.decide(Fault(record.rank, record.node, 0, cause, lost=True), saved_step)
        if isinstance(answer, GiveUp):
            self._decide(replace(record, reason=f"{record.reason}; {answer.reason}", start=""))
            return False
        from_step = max(saved_step, self._actions.in_memory())
        restart = Restart(generation, cause, record.rank, record.node, 0, from_step, time=record.time)
        self._restarts.append(replace(restart, kind="lost", ranks=len(self._round.members)))
        await self._write_restarts()
        return True

    def _can_go_on(self, failure: _Failure) -> bool:
        """Returns whether a restart may help, and can be made.

        A run whose ranks fail before their first step has a wrong input or a wrong environment.
        """
        return (
            self.limits.max_restarts > 0
            and self._actions.fresh_variables is not None
            and failure.record.exit_code not in (EXIT_BAD_INPUT, EXIT_PREEMPTED)
            and (
                self._keeps_going or bool(self._starts_again) or (failure.others_there and self._others_there)
            )
            and self._stop_at is None
            and not self._decided
            and not self._round.done
            and (bool(self._restarts) or self._has_begun())
        )

    async def _end_failed(self, failure: _Failure, why_no_restart: str = "") -> None:
        record = failure.record
        if why_no_restart:
            record = replace(record, reason=f"{record.reason}; {why_no_restart}")
        if failure.diagnosis is not None and not self._decided:
            stacks = self._round.stacks
            diagnosis = {**failure.diagnosis.to_json(record.exit_code, stacks), "nccl_ras": failure.ras}
            file = await self._exit_files.write(DIAGNOSIS_FILE, diagnosis)
            record = replace(record, details=text(failure.diagnosis, stacks, file))
        self._decide(record)

    async def _restart(self, failure: _Failure, fault: Fault, go_on: GoOn) -> None:
        """Ends all ranks, waits until every supervisor confirms it, and starts the next generation."""
        self._reached = max(self._reached, self._steps_done())
        clock = RestartClock(failure.at)
        clock.end_part("detect", time.monotonic())
        for member in failure.silent if self._keeps_going else ():
            self._lose(member, silent=True)
        its = self._begin_round()
        world = await self._next_world(failure, its)
        if world is None:
            return
        clock.end_part("end", time.monotonic())
        from_step = max(await self._exit_files.newest_checkpoint() or 0, its.in_memory)
        if self._decided:  # a stop has come, or a supervisor is lost
            return
        self._actions.say(self._line(failure, fault, go_on, from_step, world))
        details = failure.record.details[:_DETAILS]
        restart = Restart(
            its.generation,
            fault.cause,
            fault.rank,
            fault.node,
            fault.step,
            from_step,
            None,
            details,
            time=round(time.time() - (time.monotonic() - failure.at), 3),
        )
        left_out = self._left_out(world)
        self._restarts.append(replace(restart, kind=failure.kind, ranks=world.size, left_out=left_out))
        self._clock = clock
        await self._write_restarts()
        clock.end_part("agree", time.monotonic())
        if go_on.wait_s:
            await self._until(lambda: self._decided, go_on.wait_s)
            clock.end_part("wait", time.monotonic())
        await self._start_generation(failure, its, world)

    def _left_out(self, world: WorldPlan) -> tuple[str, ...]:
        """Returns in words who is left out of a world, and why."""
        nodes = self._membership.nodes
        gone: dict[str, int] = {}
        for member in self._membership.lost:
            gone[nodes[member]] = gone.get(nodes[member], 0) + 1
        lost = [f"{many(count, 'supervisor')} on {node}: gone" for node, count in sorted(gone.items())]
        bad = [f"node {node}: {why}" for node, why in self._membership.left_out(world).items()]
        return tuple([*lost, *bad][:_STACKS])

    async def _next_world(self, failure: _Failure, its: _Round) -> WorldPlan | None:
        """Returns the world of those who are there and have ended their ranks; None if the run has ended."""
        if not self._keeps_going:
            await self._until(lambda: len(its.ended) == len(its.members) or self._decided, REGROUP_S)
            left = [rank for rank, member in enumerate(its.members) if member not in its.ended]
            if left:
                ranks = ", ".join(map(str, left[:_STACKS]))
                why = f"no restart, since rank {ranks} did not end in {REGROUP_S:g} s"
                await self._end_failed(failure, why)
                return None
            nodes = self._membership.nodes
            return WorldPlan(tuple((member, nodes.get(member, "")) for member in its.members))
        limit = time.monotonic() + (self.limits.init_s if self._respawns else 0.0)
        told = False
        while not self._decided:
            await self._all_ended(its)
            if (world := self._membership.next_world()) is not None:
                return world
            if time.monotonic() >= limit:
                await self._end_failed(failure, f"no restart, since {self._too_few()}")
                return None
            if not told:
                told = True
                if not await self._is_ours(its):  # the claim says where one that comes back finds this one
                    return None
                self._actions.say(
                    f"clipship: {self._too_few()}; waiting up to {self.limits.init_s:.0f} s for the launcher "
                    "to start a supervisor again"
                )
            await asyncio.sleep(0.2)
        return None

    def _too_few(self) -> str:
        its = self._membership
        key = (
            "recovery.min_nodes"
            if self.limits.min_nodes is not None
            else "without recovery.min_nodes, the run"
        )
        return (
            f"{many(len(its.living), 'supervisor')} of {len(its.expected)} "
            f"{'is' if len(its.living) == 1 else 'are'} left, and {key} needs {many(its.fewest, 'rank')}"
        )

    async def _all_ended(self, its: _Round) -> None:
        """Waits until nobody is awaited and all who are there have ended their ranks.

        Those who do not come or do not end in time count as lost.
        """
        began = self._joined_at = time.monotonic()
        patience = ORPHANS_S + (self.limits.silence_s if self._doubtful else 0.0)
        limit = began + REGROUP_S

        def settled() -> bool:
            waiting = self._orphans or (self._awaited and time.monotonic() < self._joined_at + patience)
            return self._decided or (not waiting and its.ended >= set(self._membership.living))

        await self._until(settled, max(REGROUP_S, patience))
        self._awaited.clear()
        if time.monotonic() >= limit:
            for member in set(self._membership.living) - its.ended:
                self._lose(member, silent=True)

    async def _start_generation(self, failure: _Failure, its: _Round, world: WorldPlan) -> None:
        while not self._decided:
            variables = await self._meeting(failure, its, world)
            if self._decided:
                return
            settled = variables is not None and its.ended >= set(world.numbers) and not self._orphans
            if self._keeps_going and (not settled or self._membership.next_world() != world):
                changed = await self._next_world(failure, its)  # somebody has come or gone meanwhile
                if changed is None:
                    return
                world = changed
                left_out = self._left_out(world)
                self._restarts[-1] = replace(self._restarts[-1], ranks=world.size, left_out=left_out)
                continue
            if self._keeps_going and not await self._is_ours(its):
                return
            if self._membership.next_world() == world or not self._keeps_going:
                self._start(its, world, variables or {})
                await self._write_restarts()
                await self._watch_progress(its)
                return
            its.generation += 1  # this number is used up

    def _start(self, its: _Round, world: WorldPlan, variables: Mapping[str, str]) -> None:
        its.started, its.members = True, world.numbers
        self._ran = its.generation
        self._claimed = []
        start: Message = {"kind": "start", "generation": its.generation, "variables": dict(variables)}
        if self._keeps_going:
            start["world"] = world.to_text()
        self._actions.broadcast(start)
        self._actions.members_changed()

    async def _meeting(self, failure: _Failure, its: _Round, world: WorldPlan) -> Mapping[str, str] | None:
        """Returns the variables by which the ranks meet, which the new rank 0's supervisor chooses.

        Returns None if it does not answer, or if the run ends because there are none.
        """
        assert self._actions.fresh_variables is not None
        first = world.numbers[0]
        if not self._keeps_going or first == self._member:
            try:
                return dict(await self._actions.fresh_variables())
            except OSError as error:
                await self._end_failed(failure, f"no restart, since the ranks cannot meet again: {error}")
                return None
        its.meeting = None
        self._actions.broadcast({"kind": "meet", "member": first, "generation": its.generation})
        gone = self._membership.lost
        await self._until(lambda: its.meeting is not None or first in gone or self._decided, REGROUP_S)
        answer = its.meeting
        if answer is None:
            self._lose(first, silent=True)
            return None
        if answer.get("problem"):
            why = f"no restart, since the ranks cannot meet again: {answer['problem']}"
            await self._end_failed(failure, why)
            return None
        return dict(answer["variables"])

    async def _is_ours(self, its: _Round) -> bool:
        """Claims the generation; if another part of a cut network has it, this part leaves.

        The smaller part waits first, so that the larger one comes before it.
        """
        assert self._actions.claim is not None
        if its.generation in self._claimed:
            return True
        if self._doubtful:
            here = len(self._membership.living)
            wait_s = FENCE_S if here > len(self._doubtful) else 3 * self.limits.silence_s + 2 * ORPHANS_S
            until = max(self._doubtful.values()) + wait_s
            await self._until(lambda: self._decided or not self._doubtful, until - time.monotonic())
        while not self._decided:
            # Each number since the last generation that ran here is claimed in turn: so two parts of a cut
            # network always meet at the first one.
            number = self._claimed[-1] + 1 if self._claimed else self._ran + 1
            other = await self._actions.claim(number)
            is_dead = other is not None and other.member in self._membership.lost - self._doubtful.keys()
            if other is not None and not is_dead and other.member != self._member:
                self._leave(other)
                return False
            self._claimed.append(number)
            its.generation = max(its.generation, number + (other is not None))
            if other is None and number >= its.generation:
                return not self._decided
        return False

    def _leave(self, other: GenerationClaim) -> None:
        self._decided = True
        where = f"supervisor {other.member} on {other.node}" if other.node else "the run folder"
        self._actions.leave(where)

    async def take_over(
        self,
        ran: int,
        generation: int,
        world: WorldPlan,
        members: Sequence[tuple[int, str]],
        root: Missing,
        dead: Sequence[int],
    ) -> None:
        """Goes on in the place of another coordinator, which is lost (`root`).

        `ran` is the last generation that has run, `generation` the highest number that anybody has used,
        `world` the last world, and `members` those who were there. `dead` are those whose processes are
        surely gone; if the coordinator is none of them, it may be alive beyond a cut in the network.
        """
        self._ran = ran
        rows = await self._exit_files.restarts()
        self._restarts = [restart_from_json(row) for row in rows]
        self._policy.restore(self._restarts)
        for each in self._restarts:
            self._membership.record_fault(each.node)
        self._round.generation, self._round.members = generation, world.numbers
        here = self._membership.living
        for member, node in members:
            if member not in here:
                self._membership.join(member, node)
                self._membership.lose(member)
                if member not in dead and member != root.rank:
                    self._awaited.add(member)
                if root.rank not in dead:
                    self._doubtful[member] = time.monotonic()
        place = world.place(root.rank)
        rank = place.rank if place is not None else root.rank
        reason = supervisor_lost("those below it have lost their connections")
        record = ExitRecord(rank, root.node, EXIT_FAILED, reason, time.time(), generation=generation)
        self._fail(_Failure(record, self._present_step(), kind="lost"))

    def _begin_round(self) -> _Round:
        """Begins the next generation: what is known about this one is no longer of use."""
        for task in self._round.tasks:
            task.cancel()
        its = self._round
        self._round = _Round(its.generation + 1, its.members, started=False)
        self._actions.broadcast({"kind": "regroup", "generation": self._round.generation})
        return self._round

    def _line(self, failure: _Failure, fault: Fault, go_on: GoOn, from_step: int, world: WorldPlan) -> str:
        where = f"go on from step {from_step}" if from_step else "start again from the beginning"
        wait = f" in {go_on.wait_s:.0f} s" if go_on.wait_s >= 1 else ""
        others = "all ranks"
        if world.size != self._membership.wanted:
            others = f"{many(world.size, 'rank')} of {self._membership.wanted}"
        bad = "".join(
            f"; without node {node}: {why}" for node, why in self._membership.left_out(world).items()
        )
        if failure.kind == "taken in":
            return f"clipship: {fault.cause}: {others} {where}{bad}"
        who = rank_name(fault.rank, fault.node, failure.record.generation).rstrip(",")
        return (
            f"clipship: {who}: {fault.cause}; "
            f"restart {go_on.number} of {self.limits.max_restarts}{wait}: {others} {where}{bad}"
        )

    async def _write_restarts(self) -> None:
        await self._exit_files.update_restarts([restart.to_json() for restart in self._restarts])

    async def _watch_progress(self, its: _Round) -> None:
        """Waits for the first new step of a generation, and records how long the restart has taken."""
        while self._round is its and not self._decided:
            if self._steps_done() > self._reached:
                self._record_new_step()
                await self._write_restarts()
                return
            await asyncio.sleep(_WATCH_S)

    def _record_new_step(self) -> None:
        if self._clock is not None:
            self._clock.end_ranks_parts(self._actions.moments())
            self._clock.end_part("redone", time.monotonic())
            parts = self._clock.parts
            seconds = round(sum(parts.values()), 1)
            self._restarts[-1] = replace(self._restarts[-1], seconds=seconds, parts=parts)
            self._clock = None

    def _decide(self, record: ExitRecord) -> None:
        if not self._decided:
            self._decided = True
            restarts = tuple(restart.summary() for restart in self._restarts)
            generation = record.generation or self._round.generation
            left_out = tuple(sorted(self._membership.left_out(self.state[1])))
            its = replace(record, restarts=restarts, generation=generation, left_out=left_out)
            self._spawn(self._end(its))

    async def _end(self, record: ExitRecord) -> None:
        if self._restarts:
            await self._write_restarts()
        await self._exit_files.write(EXIT_FILE, asdict(record))
        self._actions.finish(record)

    async def _until(self, arrived: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not arrived() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    def _spawn(self, work: Any, tasks: set[asyncio.Task[None]] | None = None) -> None:
        """Runs the work; `tasks` is a round's, which cancels it when the next round begins."""
        tasks = self._tasks if tasks is None else tasks
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
