"""Restart history: the restarts of one start so far, whether there may be another, and what each took.

It is the coordinator's; restarts.json has the same list. No torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer.run.exit_files import ExitFiles
from trainer.supervise.coordinate.generation_state import Failure
from trainer.supervise.limits import Limits
from trainer.supervise.machine import Machine, now
from trainer.supervise.restarts import Restart, RestartClock, restart_from_json
from trainer.world.restart_policy import Fault, GiveUp, GoOn, RestartPolicy

_DETAILS = 4000
"""Characters of a fault's details that are kept with its restart."""


class RestartHistory:
    """Restarts of one start of the run, and the policy that has allowed them."""

    def __init__(self, limits: Limits, exit_files: ExitFiles, machine: Machine) -> None:
        self._policy = RestartPolicy(limits.max_restarts, limits.same_fault_limit, limits.backoff_s)
        self._exit_files, self._machine = exit_files, machine
        self._restarts: list[Restart] = []
        self._decided_on: dict[str, Any] = {}
        """Facts of the last decision, by the names of `Restart`'s fields."""
        self.clock: RestartClock | None = None
        """Clock of the restart under way; None if there is none."""
        self.reached = 0.0
        """Last step that any generation has done."""

    def __bool__(self) -> bool:
        return bool(self._restarts)

    @property
    def last(self) -> Restart:
        """Latest restart. Raises IndexError if there is none."""
        return self._restarts[-1]

    def restore(self, rows: Sequence[Mapping[str, Any]]) -> tuple[Restart, ...]:
        """Counts the restarts of an earlier coordinator, as restarts.json has them, and returns them."""
        self._restarts = [restart_from_json(row) for row in rows]
        for each in self._restarts:
            if each.kind != "taken in":
                self._policy.decide(each.fault, each.saved_step, new_step=each.new_step)
        return tuple(self._restarts)

    def reach_restarted_steps(self) -> None:
        """Sets `reached` to the last step that was done when a fault came."""
        steps = (max(each.steps_done, each.from_step) for each in self._restarts)
        self.reached = float(max(steps, default=0))

    async def decide(self, fault: Fault, *, new_step: bool = False) -> GoOn | GiveUp:
        """Returns what to do about a fault, see `RestartPolicy.decide`."""
        saved_step = await self.saved_step()
        self._decided_on = {"saved_step": saved_step, "new_step": new_step}
        return self._policy.decide(fault, saved_step, new_step=new_step)

    async def saved_step(self) -> int:
        """Returns the step of the newest whole checkpoint; 0 if there is none."""
        return await self._exit_files.newest_checkpoint() or 0

    def add(self, generation: int, failure: Failure, fault: Fault, from_step: int, **world: Any) -> None:
        """Adds a restart; `world` has its fields `ranks` and `left_out`."""
        at = round(self._machine.wall_time() - (now() - failure.at), 3)
        details = failure.record.details[:_DETAILS]
        restart = Restart(generation, fault.cause, fault.rank, fault.node, fault.step, from_step)
        told = {"details": details, "time": at, "kind": failure.kind, **self._decided_on, **world}
        self._restarts.append(replace(restart, **told))
        self._decided_on = {}

    def change_last(self, **fields: Any) -> None:
        """Changes fields of the latest restart."""
        self._restarts[-1] = replace(self._restarts[-1], **fields)

    def record_new_step(self, moments: Mapping[str, float]) -> None:
        """Records how long the restart under way has taken, if there is one: it has done a new step.

        `moments` are those of rank 0's heartbeat in its generation.
        """
        if self.clock is not None:
            self.clock.end_ranks_parts(moments)
            self.clock.end_part("redone", now())
            parts = self.clock.parts
            self.change_last(seconds=round(sum(parts.values()), 1), parts=parts)
            self.clock = None

    def summaries(self) -> tuple[Mapping[str, Any], ...]:
        """Returns the restarts as exit.json has them."""
        return tuple(restart.summary() for restart in self._restarts)

    async def write(self) -> None:
        """Writes restarts.json."""
        await self._exit_files.update_restarts([restart.to_json() for restart in self._restarts])
