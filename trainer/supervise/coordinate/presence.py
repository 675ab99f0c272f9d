"""Presence: which members are there, which are gone, and which may still come or may live beyond a cut.

The coordinator's part of it; `membership` holds the result. No torch.
"""

import asyncio
from collections.abc import Iterable, Sequence

from trainer.supervise.coordinate.generation_state import GenerationState
from trainer.supervise.coordinate.run_state import RunState
from trainer.supervise.machine import now
from trainer.supervise.messages import Lost

REGROUP_S = 30.0
"""Longest wait, in seconds, for every supervisor to confirm that its rank has ended before a restart."""
ORPHANS_S = 4.0
"""Longest wait, in seconds, for a supervisor to find another way after the one above it is gone.

One whose machine refuses calls to it has ended, and is not waited for.
"""


class Presence:
    """Follows who comes and who goes.

    What it finds out by waiting or by asking it posts as a message, as if the lost member's neighbour had
    told it: so a loss is handled in one place, and one at a time.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self.unreachable: dict[int, float] = {}
        """Members that may live beyond a cut in the network, and when they fell silent."""
        self._orphans: set[int] = set()
        """Members that are looking for another way to this supervisor."""
        self._awaited: set[int] = set()
        """Members of an earlier coordinator that have not come yet."""
        self._stuck: set[int] = set()
        """Members that are lost since the kernel has not ended their ranks in time."""
        self._joined_at = 0.0

    @property
    def has_orphans(self) -> bool:
        """True while members are looking for another way to this supervisor."""
        return bool(self._orphans)

    def is_stuck(self, member: int) -> bool:
        """Returns whether nobody waits for the member until its rank has ended."""
        return member in self._stuck

    def join(self, member: int, node: str) -> None:
        """Records that a member is there, for the first time or again."""
        self._stuck.discard(member)
        self._run.membership.join(member, node)
        self._orphans.discard(member)
        self._awaited.discard(member)
        self._joined_at = now()
        self.unreachable.pop(member, None)
        self._run.actions.members_changed()

    def lose(self, member: int, *, silent: bool) -> None:
        """Counts a member as gone. Those below it in the tree have ORPHANS_S to find another way.

        They are of its own node, so they may have ended with it, which their machine tells.
        """
        run = self._run
        orphans = {other for other in run.actions.below(member) if other in run.membership.living}
        run.membership.lose(member)
        self._orphans.discard(member)
        run.actions.forget(member)
        if silent:
            self.unreachable[member] = now()
        if orphans := orphans - self._orphans:
            self._orphans |= orphans
            run.spawn(self._lose_orphans(orphans, silent=silent))
            self._lose_ended(orphans, self._orphans)
        run.actions.members_changed()

    def _lose_ended(self, members: Iterable[int], waited_for: set[int]) -> None:
        """Stops waiting for those of the members whose processes have ended; `waited_for` holds them."""
        for member in members:
            self._run.spawn(self._lose_if_ended(member, waited_for))

    async def _lose_if_ended(self, member: int, waited_for: set[int]) -> None:
        if await self._run.actions.is_gone(member) and member in waited_for:
            if member in self._run.membership.living:
                reason = "its machine refuses calls to it"
                self._run.post(Lost(member, self._run.membership.nodes[member], reason))
            else:
                waited_for.discard(member)

    async def _lose_orphans(self, orphans: set[int], *, silent: bool) -> None:
        self._joined_at = now()  # the wait begins anew with each that comes
        while orphans & self._orphans and now() < self._joined_at + ORPHANS_S:
            await asyncio.sleep(0.1)  # in a large run they come one after the other
        for member in sorted(orphans & self._orphans):
            reason = "it has not come back since the supervisor above it was lost"
            self._run.post(Lost(member, self._run.membership.nodes[member], reason, silent))

    def take_over(self, members: Sequence[tuple[int, str]], root: int, dead: Sequence[int]) -> None:
        """Counts the members of an earlier coordinator (`root`) that are not here as gone for now.

        Those whose processes are not `dead` are awaited.
        """
        here = self._run.membership.living
        for member, node in members:
            if member not in here:
                self._run.membership.join(member, node)
                self._run.membership.lose(member)
                if member not in dead and member != root:
                    self._awaited.add(member)
                if root not in dead:
                    self.unreachable[member] = now()
        nodes = self._run.membership.nodes
        self._lose_ended([each for each in self._awaited if nodes[each] == nodes.get(root)], self._awaited)

    async def all_ended(self, its: GenerationState) -> None:
        """Waits until nobody is awaited and all who are there have ended their ranks.

        Those who do not come or do not end in time count as lost.
        """
        run = self._run
        began = self._joined_at = now()
        patience = ORPHANS_S + (run.limits.silence_s if self.unreachable else 0.0)
        limit = began + REGROUP_S

        def settled() -> bool:
            waiting = self._orphans or (self._awaited and now() < self._joined_at + patience)
            return not waiting and its.ended >= set(run.membership.living)

        await run.until(settled, max(REGROUP_S, patience))
        self._awaited.clear()
        if now() >= limit:
            for member in set(run.membership.living) - its.ended:
                self._stuck.add(member)
                self.lose(member, silent=True)
