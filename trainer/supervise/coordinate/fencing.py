"""Fencing: of two parts of a cut network, only one may start the next generation.

Each coordinator claims the number of the generation in the run folder, see `trainer.run.generations`, and
waits first until the ranks of silent members have surely been ended. No torch.
"""

import time
from collections.abc import Collection

from trainer.run.generations import GenerationClaim
from trainer.supervise.coordinate.generation_state import Round
from trainer.supervise.coordinate.presence import ORPHANS_S, Presence
from trainer.supervise.coordinate.run_state import RunState
from trainer.supervise.coordinate.storage_retry import Patience

FENCE_S = 3.0
"""Seconds from the silence of a supervisor until its rank has surely been ended by itself.

Both sides of a connection wait for `timeouts.silence_s`, and each looks once a second.
"""


class Fence:
    """Claims generations for one coordinator."""

    def __init__(self, run: RunState, presence: Presence) -> None:
        self._run, self._presence = run, presence
        self._ran = run.round.generation
        self._claimed: list[int] = []
        """Numbers of generations that were claimed here, or passed over, since the last that ran."""
        self._dead: frozenset[int] = frozenset()
        self._is_successor = False
        self._claimed_before = 0
        """Newest generation that anybody had claimed when this coordinator took another's place."""

    def record_start(self, generation: int) -> None:
        """Records that a generation has started, here or with an earlier coordinator."""
        self._ran, self._claimed = generation, []

    async def take_over(self, ran: int, dead: Collection[int]) -> None:
        """Goes on from the generation `ran` after earlier coordinators, whose processes are `dead`."""
        self.record_start(ran)
        self._is_successor = True
        newest = await Patience(self._run).answer(self._run.exit_files.newest_claim, None)
        self._dead, self._claimed_before = frozenset(dead), 0 if newest is None else newest.generation

    async def is_ours(self, its: Round, *, patient: bool = True) -> bool:
        """Claims the generation; if another part of a cut network has it, this part leaves.

        `patient` allows the run folder the time to answer that a start has.

        The smaller part waits first, so that the larger one comes before it; of two equal ones, the part
        that has lost its coordinator counts as the smaller. The claim of another member is passed over only
        if that was a coordinator before this one and is surely dead: a closed connection does not show which
        of the two was cut off, or was stopped for a while.
        """
        run, doubtful = self._run, self._presence.doubtful
        assert run.actions.claim is not None
        is_claimed = its.generation in self._claimed
        if doubtful:
            here, there = len(run.membership.living), len(doubtful)
            is_larger = here > there or (here == there and not self._is_successor)
            wait_s = FENCE_S if is_claimed or is_larger else 3 * run.limits.silence_s + 2 * ORPHANS_S
            until = max(doubtful.values()) + wait_s
            await run.until(lambda: run.decided or not doubtful, until - time.monotonic())
        if is_claimed:
            return not run.decided
        patience = Patience(run)
        while not run.decided:
            # Each number since the last generation that ran here is claimed in turn: so two parts of a cut
            # network always meet at the first one.
            number = self._claimed[-1] + 1 if self._claimed else self._ran + 1
            other = await run.actions.claim(number)
            if other is not None and other.member < 0 and patient and await patience.lasts():
                continue
            is_dead = other is not None and other.member in self._dead and number <= self._claimed_before
            if other is not None and not is_dead and other.member != run.member:
                self._leave(other)
                return False
            self._claimed.append(number)
            its.generation = max(its.generation, number + (other is not None))
            if other is None and number >= its.generation:
                return not run.decided
        return False

    def _leave(self, other: GenerationClaim) -> None:
        self._run.decided = True
        where = f"supervisor {other.member} on {other.node}" if other.node else "the run folder"
        self._run.actions.leave(where)
