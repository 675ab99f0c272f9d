"""Rank 0's supervisor: collects messages from all supervisors and decides how the run ends, or goes on.

No torch, no sockets. Supervisors send `joined`, `done`, `failed`, `late`, `lost`, `cut`, `stop`, `report`,
`stack` and `ended`; the coordinator sends `stop`, `collect`, `stacks`, `regroup`, `start` and `end` to all of
them. Messages about a rank carry the generation that it belongs to; those about an earlier one are dropped.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_TIMED_OUT
from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord, rank_name, supervisor_lost
from trainer.run.layout import DIAGNOSIS_FILE, EXIT_FILE
from trainer.supervise.diagnosis import Diagnosis, Missing, cut_off, text
from trainer.supervise.limits import Limits
from trainer.supervise.nccl_debug import ras_status
from trainer.supervise.rank_report import STACK_WAIT_S, RankReport
from trainer.supervise.restart_parts import RestartClock
from trainer.supervise.restarts import Fault, GiveUp, GoOn, Restart, RestartPolicy

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
    at: float = field(default_factory=time.monotonic)


@dataclass
class _Round:
    """All that the coordinator learns about one generation; the next generation gets a new one."""

    generation: int
    started: bool = True
    """False until every supervisor may start its rank of this generation."""
    ended: set[int] = field(default_factory=set)
    """Ranks of the generation before that have ended."""
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

    def __init__(self, ranks: Sequence[int], limits: Limits, exit_files: ExitFiles, actions: Actions) -> None:
        self._ranks, self.limits, self._exit_files, self._actions = ranks, limits, exit_files, actions
        self._policy = RestartPolicy(limits.max_restarts, limits.same_fault_limit, limits.backoff_s)
        self._restarts: list[Restart] = []
        self._clock: RestartClock | None = None
        """Clock of the restart under way; None if there is none."""
        self._reached = 0.0
        """Last step that any generation has done."""
        self._round = _Round(1)
        self._nodes: dict[int, str] = {}
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

    def _on_joined(self, message: Message) -> None:
        self._nodes[message["rank"]] = message["node"]
        if self._stop_at is not None:
            self._pass_on_stop()

    def _on_done(self, message: Message) -> None:
        its = self._round
        its.done[message["rank"]] = message["code"]
        its.reasons[message["rank"]] = message.get("reason", "")
        if len(its.done) == 1:
            self._spawn(self._all_done_in_time(), its.tasks)
        if len(its.done) == len(self._ranks):
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
                f"{len(done)} of {len(self._ranks)} ranks are done; the others did not end within "
                f"timeouts.shutdown_s = {self.limits.shutdown_s:g} s"
            )

    def _end_done(self) -> None:
        done = self._round.done
        code = max(done.values())
        rank = min(rank for rank, other_code in done.items() if other_code == code)
        reason = self._round.reasons[rank] or ("asked to stop" if code == EXIT_PREEMPTED else "done")
        if code == EXIT_DONE:
            self._record_new_step()  # the last one may be too short a while ago to have been seen
        self._decide(ExitRecord(rank, self._nodes.get(rank, ""), code, reason, time.time()))

    def _on_failed(self, message: Message) -> None:
        """Records a failure.

        With `waiting`, the rank failed inside a collective, so probably because another rank had ended. With
        `killed`, it got SIGKILL, which never follows from another rank's failure.
        """
        record = replace(ExitRecord(**message["record"]), generation=self._round.generation)
        failure = _Failure(record, message.get("step", 0))
        self._record_cause(_KILLED if message.get("killed") else 2.0 if message["waiting"] else 0.0, failure)

    def _on_lost(self, message: Message) -> None:
        rank, node = message["rank"], message["node"]
        reason = supervisor_lost(message["reason"])
        self._record_lost(ExitRecord(rank, node, EXIT_FAILED, reason, time.time()))

    def _on_cut(self, message: Message) -> None:
        """Records a supervisor that reports itself as cut off.

        It cannot reach a neighbour, which may be well on the other side.
        """
        reason = cut_off(message["other"])
        self._record_lost(ExitRecord(message["rank"], message["node"], EXIT_FAILED, reason, time.time()))

    def _record_lost(self, record: ExitRecord) -> None:
        """Records that a supervisor is gone; without it the ranks cannot be started again."""
        self._others_there = False
        if self._round.started:
            self._record_cause(1.0, _Failure(record, others_there=False))
        else:
            self._decide(record)

    def _record_cause(self, weight: float, failure: _Failure) -> None:
        its = self._round
        its.causes.append((weight, failure))
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
            self._leave("asked to stop during a restart of the ranks; the run can go on from its checkpoint")
        elif len(self._nodes) == len(self._ranks) and not self._actions.has_begun():
            self._leave("asked to stop before there was anything to save; the run can be started again")
        else:
            self._actions.broadcast({"kind": "stop"})

    def _leave(self, reason: str) -> None:
        self._decide(ExitRecord(0, self._nodes[self._ranks[0]], EXIT_PREEMPTED, reason, time.time()))

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
        await self._until(lambda: len(its.reports) == len(self._ranks), ANSWER_S)
        reports = [its.reports[rank] for rank in sorted(its.reports)]
        missing = [
            Missing(rank, self._nodes.get(rank, "")) for rank in self._ranks if rank not in its.reports
        ]
        diagnosis = Diagnosis(what, reports, missing)
        late = [report.rank for report in diagnosis.late][:_STACKS]
        waiting = [report.rank for report in reports if report.rank not in late][:1]
        self._actions.broadcast({"kind": "stacks", "ranks": late + waiting})
        await self._until(lambda: {*late, *waiting} <= its.stacks.keys(), STACK_WAIT_S + 1.0)
        self._fail(self._timed_out(diagnosis, await ras_status(), at))

    def _timed_out(self, diagnosis: Diagnosis, ras: str, at: float) -> _Failure:
        rank, node = next(iter(diagnosis.late_or_missing()), (0, self._nodes.get(0, "")))
        step = next((report.step for report in diagnosis.reports if report.rank == rank), 0)
        details = text(diagnosis, self._round.stacks, "")
        reason = f"timed out: {diagnosis.what}"
        record = ExitRecord(
            rank, node, EXIT_TIMED_OUT, reason, time.time(), details, generation=self._round.generation
        )
        return _Failure(record, step, diagnosis, ras, others_there=not diagnosis.missing, at=at)

    def _on_report(self, message: Message) -> None:
        report = RankReport(**message["report"])
        self._round.reports[report.rank] = report

    def _on_stack(self, message: Message) -> None:
        self._round.stacks[message["rank"]] = message["stack"]

    def _on_ended(self, message: Message) -> None:
        self._round.ended.add(message["rank"])

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
        fault = Fault(record.rank, record.node, failure.step, record.reason.partition("; ")[0])
        answer = self._policy.decide(fault, await self._exit_files.newest_checkpoint() or 0)
        if isinstance(answer, GiveUp):
            await self._end_failed(failure, answer.reason)
        elif not self._can_go_on(failure):  # a stop or a lost supervisor came while the folder was read
            await self._end_failed(failure)
        else:
            await self._restart(failure, fault, answer)

    def _can_go_on(self, failure: _Failure) -> bool:
        """Returns whether a restart may help, and can be made.

        A run whose ranks fail before their first step has a wrong input or a wrong environment.
        """
        return (
            self.limits.max_restarts > 0
            and self._actions.fresh_variables is not None
            and failure.record.exit_code not in (EXIT_BAD_INPUT, EXIT_PREEMPTED)
            and failure.others_there
            and self._others_there
            and self._stop_at is None
            and not self._decided
            and not self._round.done
            and (bool(self._restarts) or self._actions.has_begun())
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
        self._reached = max(self._reached, self._actions.steps_done())
        clock = RestartClock(failure.at)
        clock.end_part("detect", time.monotonic())
        its = self._begin_round()
        await self._until(lambda: len(its.ended) == len(self._ranks) or self._decided, REGROUP_S)
        left = [rank for rank in self._ranks if rank not in its.ended]
        if left:
            ranks = ", ".join(map(str, left[:_STACKS]))
            await self._end_failed(failure, f"no restart, since rank {ranks} did not end in {REGROUP_S:g} s")
            return
        clock.end_part("end", time.monotonic())
        from_step = await self._exit_files.newest_checkpoint() or 0
        if self._decided:  # a stop has come, or a supervisor is lost
            return
        self._actions.say(self._line(failure.record, fault, go_on, from_step))
        details = failure.record.details[:_DETAILS]
        self._restarts.append(
            Restart(
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
        )
        self._clock = clock
        await self._write_restarts()
        clock.end_part("agree", time.monotonic())
        if go_on.wait_s:
            await self._until(lambda: self._decided, go_on.wait_s)
            clock.end_part("wait", time.monotonic())
        await self._start_generation(failure, its)

    async def _start_generation(self, failure: _Failure, its: _Round) -> None:
        assert self._actions.fresh_variables is not None
        try:
            variables = dict(await self._actions.fresh_variables())
        except OSError as error:
            await self._end_failed(failure, f"no restart, since the ranks cannot meet again: {error}")
            return
        if not self._decided:
            its.started = True
            self._actions.broadcast({"kind": "start", "generation": its.generation, "variables": variables})
            await self._watch_progress(its)

    def _begin_round(self) -> _Round:
        """Begins the next generation: what is known about this one is no longer of use."""
        for task in self._round.tasks:
            task.cancel()
        self._round = _Round(self._round.generation + 1, started=False)
        self._actions.broadcast({"kind": "regroup", "generation": self._round.generation})
        return self._round

    def _line(self, record: ExitRecord, fault: Fault, go_on: GoOn, from_step: int) -> str:
        where = f"go on from step {from_step}" if from_step else "start again from the beginning"
        wait = f" in {go_on.wait_s:.0f} s" if go_on.wait_s >= 1 else ""
        return (
            f"clipship: {rank_name(fault.rank, fault.node, record.generation).rstrip(',')}: {fault.cause}; "
            f"restart {go_on.number} of {self.limits.max_restarts}{wait}: all ranks {where}"
        )

    async def _write_restarts(self) -> None:
        await self._exit_files.update_restarts([restart.to_json() for restart in self._restarts])

    async def _watch_progress(self, its: _Round) -> None:
        """Waits for the first new step of a generation, and records how long the restart has taken."""
        while self._round is its and not self._decided:
            if self._actions.steps_done() > self._reached:
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
            self._spawn(self._end(replace(record, restarts=restarts, generation=generation)))

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
