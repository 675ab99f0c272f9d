"""Rank 0's supervisor: collects messages from all supervisors and decides how the run ends.

No torch, no sockets. Supervisors send `joined`, `done`, `failed`, `late`, `lost`, `cut`, `stop`, `report` and
`stack`; the coordinator sends `stop`, `collect`, `stacks` and `end` to all of them.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from trainer.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_TIMED_OUT
from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord, supervisor_lost
from trainer.run.layout import DIAGNOSIS_FILE, EXIT_FILE
from trainer.supervise.diagnosis import Diagnosis, Missing, cut_off, text
from trainer.supervise.limits import Limits
from trainer.supervise.nccl_debug import ras_status
from trainer.supervise.rank_report import STACK_WAIT_S, RankReport

Message = dict[str, Any]

SETTLE_S = 0.4
"""Seconds between the first report of a failure and the decision.

Failures that follow from the first one may be reported before it.
"""
ANSWER_S = 4.0
"""Longest wait, in seconds, for every supervisor to report what its rank does."""
REPEAT_S = 5.0
"""Signals within this many seconds of the first are one request: launchers and schedulers send several."""
_STACKS = 16


class Coordinator:
    """Decides once how the run ends.

    `broadcast` sends a message to every supervisor, this one included; `finish` ends the run.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        limits: Limits,
        exit_files: ExitFiles,
        broadcast: Callable[[Message], None],
        finish: Callable[[ExitRecord], None],
        has_begun: Callable[[], bool] = lambda: True,
    ) -> None:
        """`has_begun` returns whether rank 0, and so maybe others, has done anything that could be saved."""
        self._ranks, self.limits, self._exit_files = ranks, limits, exit_files
        self._broadcast, self._finish, self._has_begun = broadcast, finish, has_begun
        self._nodes: dict[int, str] = {}
        self._done: dict[int, int] = {}
        self._reasons: dict[int, str] = {}
        self._causes: list[tuple[float, ExitRecord]] = []
        self._reports: dict[int, RankReport] = {}
        self._stacks: dict[int, str] = {}
        self._stop_at: float | None = None
        self._decided = False
        self._collecting = False
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, message: Message) -> None:
        """Handles one message from another supervisor or from rank 0's own."""
        handler = getattr(self, f"_on_{message['kind']}", None)
        if handler is not None and not self._decided:
            handler(message)

    def _on_joined(self, message: Message) -> None:
        self._nodes[message["rank"]] = message["node"]
        if self._stop_at is not None:
            self._pass_on_stop()

    def _on_done(self, message: Message) -> None:
        self._done[message["rank"]] = message["code"]
        self._reasons[message["rank"]] = message.get("reason", "")
        if len(self._done) == 1:
            self._spawn(self._all_done_in_time())
        if len(self._done) == len(self._ranks):
            self._end_done()

    async def _all_done_in_time(self) -> None:
        """Waits `shutdown_s` for all ranks to end after the first.

        Ranks leave together, after a barrier, so one that stays behind is stuck in its clean-up.
        """
        await asyncio.sleep(self.limits.shutdown_s)
        # If the ranks were preempted, the state is saved and the reason known, so no diagnosis is needed.
        if EXIT_PREEMPTED in self._done.values():
            self._end_done()
        else:
            await self._collect(
                f"{len(self._done)} of {len(self._ranks)} ranks are done; the others did not end within "
                f"timeouts.shutdown_s = {self.limits.shutdown_s:g} s"
            )

    def _end_done(self) -> None:
        code = max(self._done.values())
        rank = min(rank for rank, other_code in self._done.items() if other_code == code)
        reason = self._reasons[rank] or ("asked to stop" if code == EXIT_PREEMPTED else "done")
        self._decide(ExitRecord(rank, self._nodes.get(rank, ""), code, reason, time.time()))

    def _on_failed(self, message: Message) -> None:
        """Records a failure.

        With `waiting`, the rank failed inside a collective, so probably because another rank had ended.
        """
        self._record_cause(0.0 if not message["waiting"] else 2.0, ExitRecord(**message["record"]))

    def _on_lost(self, message: Message) -> None:
        rank, node = message["rank"], message["node"]
        reason = supervisor_lost(message["reason"])
        self._record_cause(1.0, ExitRecord(rank, node, EXIT_FAILED, reason, time.time()))

    def _on_cut(self, message: Message) -> None:
        """Records a supervisor that reports itself as cut off.

        It cannot reach a neighbour, which may be well on the other side.
        """
        self._record_cause(
            1.0,
            ExitRecord(message["rank"], message["node"], EXIT_FAILED, cut_off(message["other"]), time.time()),
        )

    def _record_cause(self, weight: float, record: ExitRecord) -> None:
        self._causes.append((weight, record))
        if len(self._causes) == 1 and not self._collecting:
            self._spawn(self._decide_on_first_cause())

    async def _decide_on_first_cause(self) -> None:
        await asyncio.sleep(SETTLE_S)
        self._decide(min(self._causes, key=lambda cause: (cause[0], cause[1].time))[1])

    def _on_late(self, message: Message) -> None:
        self._spawn(self._collect(message["what"]))

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
        once.
        """
        if len(self._nodes) == len(self._ranks) and not self._has_begun():
            reason = "asked to stop before there was anything to save; the run can be started again"
            self._decide(ExitRecord(0, self._nodes[self._ranks[0]], EXIT_PREEMPTED, reason, time.time()))
        else:
            self._broadcast({"kind": "stop"})

    async def _stopped_in_time(self) -> None:
        limit = self.limits.checkpoint_s + self.limits.shutdown_s
        await asyncio.sleep(limit)
        await self._collect(
            f"the run was asked to stop and had not ended after {limit:g} s "
            "(timeouts.checkpoint_s + timeouts.shutdown_s)"
        )

    async def _collect(self, what: str) -> None:
        """Collects reports from all ranks and stacks from late ones; decides even if some do not answer."""
        if self._collecting or self._decided:
            return
        self._collecting = True
        self._broadcast({"kind": "collect"})
        await self._until(lambda: len(self._reports) == len(self._ranks), ANSWER_S)
        reports = [self._reports[rank] for rank in sorted(self._reports)]
        missing = [
            Missing(rank, self._nodes.get(rank, "")) for rank in self._ranks if rank not in self._reports
        ]
        diagnosis = Diagnosis(what, reports, missing)
        late = [report.rank for report in diagnosis.late][:_STACKS]
        waiting = [report.rank for report in reports if report.rank not in late][:1]
        self._broadcast({"kind": "stacks", "ranks": late + waiting})
        await self._until(lambda: {*late, *waiting} <= self._stacks.keys(), STACK_WAIT_S + 1.0)
        self._decide(await self._timed_out(diagnosis, await ras_status()))

    async def _timed_out(self, diagnosis: Diagnosis, ras: str) -> ExitRecord:
        file = await self._exit_files.write(
            DIAGNOSIS_FILE, {**diagnosis.to_json(EXIT_TIMED_OUT, self._stacks), "nccl_ras": ras}
        )
        rank, node = next(iter(diagnosis.late_or_missing()), (0, self._nodes.get(0, "")))
        return ExitRecord(
            rank,
            node,
            EXIT_TIMED_OUT,
            f"timed out: {diagnosis.what}",
            time.time(),
            text(diagnosis, self._stacks, file),
        )

    def _on_report(self, message: Message) -> None:
        report = RankReport(**message["report"])
        self._reports[report.rank] = report

    def _on_stack(self, message: Message) -> None:
        self._stacks[message["rank"]] = message["stack"]

    def _decide(self, record: ExitRecord) -> None:
        if not self._decided:
            self._decided = True
            self._spawn(self._end(record))

    async def _end(self, record: ExitRecord) -> None:
        await self._exit_files.write(EXIT_FILE, asdict(record))
        self._finish(record)

    async def _until(self, arrived: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not arrived() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
