"""State of the run that all parts of the coordinator share: the present round, and the decision that ends it.

No torch.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord
from trainer.run.layout import DIAGNOSIS_FILE, EXIT_FILE
from trainer.supervise.background import spawn
from trainer.supervise.coordinate.actions import Actions
from trainer.supervise.coordinate.diagnosis import text
from trainer.supervise.coordinate.generation_state import Failure, Round
from trainer.supervise.coordinate.membership import Membership, WorldPlan
from trainer.supervise.limits import Limits
from trainer.supervise.restart_history import RestartHistory

_WATCH_S = 0.1


class RunState:
    """State of the run at its coordinator: its parts change the round, and one of them decides the end."""

    def __init__(
        self,
        ranks: Sequence[int],
        limits: Limits,
        exit_files: ExitFiles,
        actions: Actions,
        membership: Membership,
        *,
        member: int,
        keeps_going: bool,
        respawns: bool,
        starts_again: str,
        generation: int,
    ) -> None:
        """The parameters are those of `Coordinator`."""
        self.limits, self.exit_files, self.actions = limits, exit_files, actions
        self.membership, self.member = membership, member
        self.keeps_going = keeps_going and limits.max_restarts > 0 and actions.claim is not None
        """True if the launcher keeps the others when a supervisor is gone."""
        self.respawns = respawns
        """True if the launcher starts a lost supervisor again."""
        self.starts_again = starts_again if limits.max_restarts > 0 and not self.keeps_going else ""
        """When the launcher starts all supervisors again, see `world`; "": never."""
        self.history = RestartHistory(limits, exit_files)
        self.round = Round(generation, tuple(ranks))
        """Present generation, or the next one while it is being agreed on."""
        self.stop_at: float | None = None
        """Time of the first request to stop; None if there was none."""
        self.decided = False
        """True once it is decided how the run ends, or that this coordinator leaves it."""
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def world(self) -> WorldPlan:
        """World of the present round."""
        nodes = self.membership.nodes
        return WorldPlan(tuple((member, nodes.get(member, "")) for member in self.round.members))

    def node_of(self, rank: int) -> str:
        """Returns the node of a rank of the present round, "" if it is not known."""
        members = self.round.members
        return self.membership.nodes.get(members[rank], "") if rank < len(members) else ""

    def steps_done(self) -> float:
        """Returns the number of the last step that rank 0 has done in its present generation."""
        return max(self.actions.steps_done(), float(self.round.progress.get("steps_done", 0.0)))

    def moments(self) -> Mapping[str, float]:
        """Returns the moments of rank 0's start in its present generation, on this process's clock."""
        told: Mapping[str, float] = self.round.progress.get("moments", {})
        return told or self.actions.moments()

    def present_step(self) -> int:
        """Returns the last step that is done, 0 if it is not known."""
        done = self.steps_done()
        return int(done) if done < float("inf") else 0

    def has_begun(self) -> bool:
        """Returns whether rank 0, and so perhaps others, has done anything that could be saved."""
        return self.actions.has_begun() or bool(self.round.progress.get("begun"))

    def begin_round(self) -> Round:
        """Begins the next generation: what is known about this one is no longer of use."""
        for task in self.round.tasks:
            task.cancel()
        its = self.round
        had_stepped = self.present_step() > 0
        self.round = Round(its.generation + 1, its.members, started=False, had_stepped=had_stepped)
        self.actions.broadcast({"kind": "regroup", "generation": self.round.generation})
        return self.round

    async def watch_progress(self, its: Round) -> None:
        """Waits for the first new step of a generation, and records how long the restart has taken."""
        while self.round is its and not self.decided:
            if self.steps_done() > self.history.reached:
                self.history.record_new_step(self.moments())
                await self.history.write()
                return
            await asyncio.sleep(_WATCH_S)

    def decide(self, record: ExitRecord) -> None:
        """Ends the run with this record; of several decisions the first counts."""
        if not self.decided:
            self.decided = True
            generation = record.generation or self.round.generation
            left_out = tuple(sorted(self.membership.bad_nodes))
            restarts = self.history.summaries()
            its = replace(record, restarts=restarts, generation=generation, left_out=left_out)
            self.spawn(self._end(its))

    async def end_failed(self, failure: Failure, why_no_restart: str = "") -> None:
        """Ends the run because of a failure."""
        record = failure.record
        if why_no_restart:
            record = replace(record, reason=f"{record.reason}; {why_no_restart}")
        if failure.diagnosis is not None and not self.decided:
            stacks = self.round.stacks
            diagnosis = {
                "generation": record.generation,
                **failure.diagnosis.to_json(record.exit_code, stacks),
                "nccl_ras": failure.ras,
            }
            file = await self.exit_files.write(DIAGNOSIS_FILE, diagnosis)
            record = replace(record, details=text(failure.diagnosis, stacks, file))
        self.decide(record)

    async def _end(self, record: ExitRecord) -> None:
        if self.history:
            await self.history.write()
        await self.exit_files.write(EXIT_FILE, asdict(record))
        self.actions.finish(record)

    async def until(self, arrived: Callable[[], bool], timeout_s: float) -> None:
        """Waits until `arrived`, but no longer than the timeout."""
        deadline = time.monotonic() + timeout_s
        while not arrived() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    def spawn(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]] | None = None) -> None:
        """Runs the work; `tasks` is a round's, which cancels it when the next round begins."""
        spawn(work, self.tasks if tasks is None else tasks)
