"""Ends one supervisor: as the coordinator says, or alone if it does not reach the coordinator. No torch."""

import asyncio
import traceback
from contextlib import suppress
from dataclasses import asdict, replace

from trainer.errors import EXIT_FAILED, EXIT_START_AGAIN
from trainer.run.exit_record import ExitRecord, record_cause
from trainer.run.launcher_word import StartRequest
from trainer.run.layout import DIAGNOSIS_FILE, EXIT_FILE
from trainer.supervise.context import SupervisorContext
from trainer.supervise.coordinate.diagnosis import Diagnosis, Missing, text
from trainer.supervise.messages import CutOff
from trainer.supervise.rank.own_rank import OwnRank
from trainer.world.variables import RESPAWNED, STARTS_AGAIN


class Ending:
    """End of one supervisor; the first exit code counts."""

    def __init__(self, context: SupervisorContext, own: OwnRank) -> None:
        self._context, self._own = context, own
        self.code: int | None = None
        """Exit code; None while the run goes on."""
        self.changed = asyncio.Event()
        """Is set when the code has come, so that nobody waits longer."""
        self._failing = False

    def end(self, code: int) -> None:
        """Ends this supervisor with the exit code."""
        if self._context.tree is not None:
            self._context.tree.ending = True
        self.code = code if self.code is None else self.code
        self._own.closed = True
        self.changed.set()

    def show(self, record: ExitRecord) -> None:
        """Shows people why the run ends."""
        self._context.machine.say(record.headline())
        # If the cause was recorded, the process that started the launcher shows the details, last.
        if not record_cause(replace(record, shown=True), self._context.env) and record.details:
            self._context.machine.say(record.details)

    def fail(self, error: BaseException) -> None:
        """Ends this supervisor for an error of its own; the others notice that it is gone.

        It needs no thread and no process: such an error may come from their shortage.
        """
        if self.code is not None or self._failing:
            return
        self._failing = True
        reason = f"its supervisor failed: {type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        node, number = self._context.world.node, self._own.latest
        record = ExitRecord(
            self._own.number,
            node,
            EXIT_FAILED,
            reason,
            self._context.machine.wall_time(),
            trace,
            generation=number,
        )
        with suppress(OSError):  # a full disk must not keep it from ending
            self.show(record)
        self._context.spawn(self._end_failed(record))

    async def _end_failed(self, record: ExitRecord) -> None:
        try:
            if not self._context.keeps_going:  # else the others go on, and the run has not ended
                await self._context.exit_files.write(EXIT_FILE, asdict(record))
        finally:
            self.end(record.exit_code)

    def leave(self, reason: str) -> None:
        """Ends this supervisor and all below it, since others may go on without them."""
        if self._context.tree is not None:
            self._context.tree.ending = True
            self._context.tree.down(CutOff())
        self.end_without_record(EXIT_FAILED, reason)

    def end_without_record(self, code: int, reason: str) -> None:
        """Ends this rank without writing into the run folder.

        That folder may be on another network; it is left to supervisors that still reach each other.
        """
        if self.code is None:
            node = self._context.world.node
            self.show(ExitRecord(self._own.number, node, code, reason, self._context.machine.wall_time()))
            self.end(code)

    async def end_unjoined(self, code: int, reason: str, missing: Missing | None = None) -> None:
        """Ends this supervisor since it cannot join the others; none of it was part of the run.

        If it was started again and the run goes on without it, nothing is written into the run folder, and
        people hear of it only once.
        """
        tries = self._context.env.get(RESPAWNED)
        if not tries or not await self._context.exit_files.is_going_on():
            await self.end_alone(code, reason, missing)
        elif self.code is None:
            if tries == "1":
                world = self._context.world
                who = f"supervisor {world.rank} on {world.node}"
                self._context.machine.say(f"clipship: {who} cannot join the run again: {reason}")
            self.end(code)

    async def end_alone(self, code: int, reason: str, missing: Missing | None = None) -> None:
        """Ends this rank if rank 0's supervisor does not decide, not yet or no longer.

        Writes the cause in its place.
        """
        if self.code is not None:
            return
        own, files = self._own, self._context.exit_files
        rank, node = (missing.rank, missing.node) if missing else (own.number, self._context.world.node)
        its = own.report()
        diagnosis = Diagnosis(reason, [] if its is None else [its], [missing] if missing else [])
        number = own.generation.number if own.generation is not None else own.latest
        record = ExitRecord(
            rank,
            node,
            code,
            reason,
            self._context.machine.wall_time(),
            text(diagnosis, {}, ""),
            generation=number,
        )
        self.show(record)
        if self._may_start_again:
            done, kept = own.steps_done, self._context.machine.newest_kept(self._context.env)
            following = replace(record, generation=max(own.ran, own.latest) + 1)
            asked = await files.requested_start()
            if asked is None or asked.record.generation <= own.ran:  # else the coordinator has asked
                await files.request_start(StartRequest(following, steps_done=done, in_memory=kept))
            self.end(EXIT_START_AGAIN)
            return
        # The exit record is first: a launcher that saw rank 0 die kills the others within half a second.
        await files.write(EXIT_FILE, asdict(record))
        await files.write(DIAGNOSIS_FILE, {"generation": number, **diagnosis.to_json(code, {})})
        self.end(code)

    @property
    def _may_start_again(self) -> bool:
        """True if the launcher starts all supervisors again, and there is something to go on from."""
        begun = self._own.ran > 1 or self._own.has_begun
        return bool(self._context.env.get(STARTS_AGAIN)) and self._context.limits.max_restarts > 0 and begun
