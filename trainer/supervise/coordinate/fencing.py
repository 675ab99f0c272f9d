"""Fencing: of two parts of a cut network, only one may start the next generation.

Each coordinator claims the number of the generation in the run folder, see `trainer.run.generations`, and
waits first until the ranks of silent members have surely been ended. No torch.
"""

from collections.abc import Collection

from trainer.run.generations import WAITING, GenerationClaim
from trainer.supervise.coordinate.diagnosis import cut_off
from trainer.supervise.coordinate.generation_state import GenerationState
from trainer.supervise.coordinate.membership import WorldPlan, place_in
from trainer.supervise.coordinate.presence import ORPHANS_S, REGROUP_S, Presence
from trainer.supervise.coordinate.run_state import RunState, StorageRetry
from trainer.supervise.machine import now

FENCE_S = 3.0
"""Seconds from the silence of a supervisor until its rank has surely been ended by itself.

Both sides of a connection wait for `timeouts.silence_s`, and each looks once a second.
"""


def smaller_waits_s(silence_s: float) -> float:
    """Returns the seconds from the silence of the others until the smaller part of a cut network claims.

    The larger part has claimed by then, though ranks of its own do not end in time.
    """
    return 2 * ORPHANS_S + max(3 * silence_s, silence_s + REGROUP_S)


class Fence:
    """Claims generations for one coordinator."""

    def __init__(self, run: RunState, presence: Presence) -> None:
        self._run, self._presence = run, presence
        self._claimed: dict[int, str] = {}
        """World, as text, of each generation claimed here, or passed over, since the last that ran."""
        self._dead: frozenset[int] = frozenset()
        self._is_successor = False
        self._claimed_before = 0
        """Newest generation that anybody had claimed when this coordinator took another's place."""

    def record_start(self, generation: int) -> None:
        """Records that a generation has started, here or with an earlier coordinator."""
        self._run.ran, self._claimed = generation, {}

    async def take_over(self, ran: int, dead: Collection[int]) -> None:
        """Goes on from the generation `ran` after earlier coordinators, whose processes are `dead`."""
        self.record_start(ran)
        self._is_successor = True
        newest = await StorageRetry(self._run).answer(self._run.exit_files.newest_claim, None)
        self._dead, self._claimed_before = frozenset(dead), 0 if newest is None else newest.generation

    async def waits(self, its: GenerationState) -> bool:
        """Claims the generation until there are enough members, so that one that comes back finds the way."""
        return await self._is_ours(its, WAITING)

    async def is_ours(
        self, its: GenerationState, world: WorldPlan | None = None, *, patient: bool = True
    ) -> bool:
        """Claims the generation for a world that it starts; None if the run ends.

        `patient` allows the run folder the time to answer that a start has.
        """
        return await self._is_ours(its, "" if world is None else world.to_text(), patient=patient)

    async def _is_ours(self, its: GenerationState, text: str, *, patient: bool = True) -> bool:
        """Claims the generation; if another part of a cut network has it, this part leaves the run.

        The smaller part waits first, so that the larger one comes before it; of two equal ones, the part
        that has lost its coordinator counts as the smaller. The claim of another member is passed over only
        if its generation cannot run without a rank of this supervisor, which never heard of it, or if that
        was a coordinator before this one and is surely dead: a closed connection does not show which of the
        two was cut off, or was stopped for a while.
        """
        run, unreachable = self._run, self._presence.unreachable
        # What was claimed for a world may be passed over by those in it: it is no claim of anything else.
        is_claimed = self._claimed.get(its.number) == text
        if unreachable:
            here, there = len(run.membership.living), len(unreachable)
            is_larger = here > there or (here == there and not self._is_successor)
            wait_s = FENCE_S if is_claimed or is_larger else smaller_waits_s(run.limits.silence_s)
            until = max(unreachable.values()) + wait_s
            await run.until(lambda: not unreachable, until - now())
        if is_claimed:
            return True
        retry = StorageRetry(run)
        while True:
            # Each number since the last generation that ran here is claimed in turn: so two parts of a cut
            # network always meet at the first one.
            number = max(self._claimed, default=run.ran) + 1
            try:
                other = await run.claim(number, text)
            except OSError as error:
                if patient and await retry.lasts(error):
                    continue
                run.leave(f"the run folder takes no claim of generation {number}: {error.strerror or error}")
                return False
            if other is not None and not self._may_pass(other):
                who = f"supervisor {other.member} on {other.node}"
                of_this_start = other.start == run.exit_files.start
                run.leave(cut_off(who) if of_this_start else f"another start has generation {number}: {who}")
                return False
            self._claimed[number] = text
            its.number = max(its.number, number + (other is not None))
            if other is None and number >= its.number:
                return True

    def _may_pass(self, other: GenerationClaim) -> bool:
        """Returns whether a claim is this coordinator's, or one whose generation surely never begins."""
        if other.start != self._run.exit_files.start:
            return False  # claims of earlier starts are removed when one begins
        if other.member == self._run.member or other.world == WAITING:
            return True
        is_dead = other.member in self._dead and other.generation <= self._claimed_before
        return is_dead or place_in(other.world, self._run.member) is not None
