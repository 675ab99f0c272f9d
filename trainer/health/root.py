"""What rank 0's supervisor decides for the run: why it ends, with which exit code, and who is asked what. No torch, no sockets.

Supervisors tell it `joined`, `done`, `failed`, `late`, `lost`, `stop`, `report`; it tells all of them `stop`, `collect`, `stacks`, `end`.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from trainer.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_TIMED_OUT
from trainer.exits import ExitRecord
from trainer.health.diagnosis import Diagnosis, Missing, cut_off, text
from trainer.health.evidence import STACK_WAIT_S, Report
from trainer.health.gpu import ras_status
from trainer.health.last_words import DIAGNOSIS_FILE, EXIT_FILE, LastWords
from trainer.health.limits import Limits

Message = dict[str, Any]

SETTLE_S = 0.4
"""Between the first news of a failure and the verdict: the noise that follows a failure can be faster than the news of it."""
ANSWER_S = 4.0
"""For every supervisor to say what its rank is doing."""
REPEAT_S = 5.0
"""Signals within so long of the first are one request: launchers and schedulers send several."""
_STACKS = 16


class Root:
    """One decision, made once. `say` reaches every supervisor, this one included; `finish` ends the run."""

    def __init__(
        self,
        ranks: Sequence[int],
        limits: Limits,
        words: LastWords,
        say: Callable[[Message], None],
        finish: Callable[[ExitRecord], None],
    ) -> None:
        self._ranks, self.limits, self._words = ranks, limits, words
        self._say, self._finish = say, finish
        self._nodes: dict[int, str] = {}
        self._done: dict[int, int] = {}
        self._reasons: dict[int, str] = {}
        self._causes: list[tuple[float, ExitRecord]] = []
        self._reports: dict[int, Report] = {}
        self._stacks: dict[int, str] = {}
        self._stop_at: float | None = None
        self._decided = False
        self._collecting = False
        self._tasks: set[asyncio.Task[None]] = set()

    def hear(self, message: Message) -> None:
        """One message from below, or from this rank's own supervisor."""
        handler = getattr(self, f"_on_{message['kind']}", None)
        if handler is not None and not self._decided:
            handler(message)

    def _on_joined(self, message: Message) -> None:
        self._nodes[message["rank"]] = message["node"]
        if self._stop_at is not None:
            self._say({"kind": "stop"})

    def _on_done(self, message: Message) -> None:
        self._done[message["rank"]] = message["code"]
        self._reasons[message["rank"]] = message.get("reason", "")
        if len(self._done) == 1:
            self._spawn(self._all_done_in_time())
        if len(self._done) == len(self._ranks):
            self._end_well()

    async def _all_done_in_time(self) -> None:
        """Ranks leave together, after a barrier: what stays behind is stuck in its clean-up."""
        await asyncio.sleep(self.limits.shutdown_s)
        if EXIT_PREEMPTED in self._done.values():  # the state is saved and the reason known: nothing to find out
            self._end_well()
        else:
            await self._collect(f"{len(self._done)} of {len(self._ranks)} ranks are done, the others not within timeouts.shutdown_s")

    def _end_well(self) -> None:
        code = max(self._done.values())
        rank = min(rank for rank, its in self._done.items() if its == code)
        reason = self._reasons[rank] or ("asked to stop" if code == EXIT_PREEMPTED else "done")
        self._decide(ExitRecord(rank, self._nodes.get(rank, ""), code, reason, time.time()))

    def _on_failed(self, message: Message) -> None:
        """`waiting`: it failed inside a collective, so probably of another rank's end."""
        self._note(0.0 if not message["waiting"] else 2.0, ExitRecord(**message["record"]))

    def _on_lost(self, message: Message) -> None:
        rank, node = message["rank"], message["node"]
        reason = f"its supervisor is gone: {message['reason']}; the node failed, or somebody killed it"
        self._note(1.0, ExitRecord(rank, node, EXIT_FAILED, reason, time.time()))

    def _on_cut(self, message: Message) -> None:
        """Who cannot reach a neighbour says it of itself: on the other side the neighbour may be well."""
        self._note(1.0, ExitRecord(message["rank"], message["node"], EXIT_FAILED, cut_off(message["other"]), time.time()))

    def _note(self, weight: float, record: ExitRecord) -> None:
        self._causes.append((weight, record))
        if len(self._causes) == 1 and not self._collecting:
            self._spawn(self._verdict())

    async def _verdict(self) -> None:
        await asyncio.sleep(SETTLE_S)
        self._decide(min(self._causes, key=lambda cause: (cause[0], cause[1].time))[1])

    def _on_late(self, message: Message) -> None:
        self._spawn(self._collect(message["what"]))

    def _on_stop(self, message: Message) -> None:
        """The first asks the ranks to save and leave; one that comes REPEAT_S later does not wait for that."""
        if self._stop_at is None:
            self._stop_at = time.monotonic()
            self._say({"kind": "stop"})
            self._spawn(self._stopped_in_time())
        elif time.monotonic() - self._stop_at > REPEAT_S:
            reason = f"a second signal ({message['signal']}): left at once, without saving"
            self._decide(ExitRecord(message["rank"], message["node"], 128 + message["signal"], reason, time.time()))

    async def _stopped_in_time(self) -> None:
        limit = self.limits.checkpoint_s + self.limits.shutdown_s
        await asyncio.sleep(limit)
        await self._collect(f"asked to stop, the run had not ended after {limit:g} s (timeouts.checkpoint_s + timeouts.shutdown_s)")

    async def _collect(self, what: str) -> None:
        """Ask all what they do, the late ones for their stacks too; then decide, whoever did not answer."""
        if self._collecting or self._decided:
            return
        self._collecting = True
        self._say({"kind": "collect"})
        await self._until(lambda: len(self._reports) == len(self._ranks), ANSWER_S)
        reports = [self._reports[rank] for rank in sorted(self._reports)]
        missing = [Missing(rank, self._nodes.get(rank, "")) for rank in self._ranks if rank not in self._reports]
        found = Diagnosis(what, reports, missing)
        late = [report.rank for report in found.late][:_STACKS]
        waiting = [report.rank for report in reports if report.rank not in late][:1]
        self._say({"kind": "stacks", "ranks": late + waiting})
        await self._until(lambda: {*late, *waiting} <= self._stacks.keys(), STACK_WAIT_S + 1.0)
        self._decide(await self._timed_out(found, await ras_status()))

    async def _timed_out(self, found: Diagnosis, ras: str) -> ExitRecord:
        file = await self._words.keep(DIAGNOSIS_FILE, {**found.to_json(EXIT_TIMED_OUT, self._stacks), "nccl_ras": ras})
        rank, node = next(iter(found.names()), (0, self._nodes.get(0, "")))
        return ExitRecord(rank, node, EXIT_TIMED_OUT, f"timed out: {found.what}", time.time(), text(found, self._stacks, file))

    def _on_report(self, message: Message) -> None:
        found = Report(**message["report"])
        self._reports[found.rank] = found

    def _on_stack(self, message: Message) -> None:
        self._stacks[message["rank"]] = message["stack"]

    def _decide(self, record: ExitRecord) -> None:
        if not self._decided:
            self._decided = True
            self._spawn(self._end(record))

    async def _end(self, record: ExitRecord) -> None:
        await self._words.keep(EXIT_FILE, asdict(record))
        self._finish(record)

    async def _until(self, arrived: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not arrived() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
