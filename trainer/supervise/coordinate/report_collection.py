"""Collection of reports: asks every supervisor what its rank does after a limit has passed. No torch."""

from trainer.errors import EXIT_TIMED_OUT
from trainer.run.exit_record import ExitRecord
from trainer.supervise.coordinate.diagnosis import Diagnosis, Missing, text
from trainer.supervise.coordinate.generation_state import Failure
from trainer.supervise.coordinate.recovery import Recovery
from trainer.supervise.coordinate.run_state import RunState
from trainer.supervise.machine import now
from trainer.supervise.messages import Collect, CollectStacks, Report, Stack
from trainer.supervise.rank.rank_report import STACK_WAIT_S

ANSWER_S = 4.0
"""Longest wait, in seconds, for every supervisor to report what its rank does."""
_STACKS = 16


class ReportCollection:
    """Collects the diagnosis of a generation, and passes it on as a failure."""

    def __init__(self, run: RunState, recovery: Recovery) -> None:
        self._run, self._recovery = run, recovery

    async def collect(self, what: str) -> None:
        """Collects reports from all ranks and stacks from late ones; fails even if some do not answer.

        `what` says which limit has passed.
        """
        run, its = self._run, self._run.generation
        if its.collecting:
            return
        its.collecting, at = True, now()
        run.broadcast(Collect())
        # Some will never answer: that is what it is about.
        await run.until(lambda: len(its.reports) == len(its.members), ANSWER_S)
        reports = [its.reports[rank] for rank in sorted(its.reports)]
        missing = [
            Missing(rank, run.node_of(rank)) for rank in range(len(its.members)) if rank not in its.reports
        ]
        diagnosis = Diagnosis(what, reports, missing)
        late = [report.rank for report in diagnosis.late][:_STACKS]
        waiting = [report.rank for report in reports if report.rank not in late][:1]
        run.broadcast(CollectStacks((*late, *waiting)))
        await run.until(lambda: {*late, *waiting} <= its.stacks.keys(), STACK_WAIT_S + 1.0)
        self._recovery.fail(self._timed_out(diagnosis, await self._run.context.machine.ras_status(), at))

    def record_report(self, message: Report) -> None:
        """Records the report of a rank."""
        self._run.generation.reports[message.report.rank] = message.report

    def record_stack(self, message: Stack) -> None:
        """Records the Python stack of a rank."""
        self._run.generation.stacks[message.rank] = message.stack

    def _timed_out(self, diagnosis: Diagnosis, ras: str, at: float) -> Failure:
        its = self._run.generation
        rank, node = next(iter(diagnosis.late_or_missing()), (0, self._run.node_of(0)))
        working_on = self._run.present_step() + 1
        step = next((report.step for report in diagnosis.reports if report.rank == rank), working_on)
        details = text(diagnosis, its.stacks, "")
        reason = f"timed out: {diagnosis.what}"
        record = ExitRecord(
            rank, node, EXIT_TIMED_OUT, reason, self._run.wall_time(), details, generation=its.number
        )
        silent = tuple(its.members[missing.rank] for missing in diagnosis.missing)
        return Failure(record, step, diagnosis, ras, others_there=not silent, silent=silent, at=at)
