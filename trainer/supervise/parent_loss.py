"""Loss of the supervisor above in the tree: finds another way to the coordinator, or ends.

Where the launcher keeps the others going, the rank ends at once and its supervisor calls the coordinator, or
takes its place. Elsewhere the supervisor ends with the run. No torch.
"""

import asyncio

from trainer.errors import EXIT_FAILED, EXIT_TIMED_OUT
from trainer.run.exit_record import supervisor_lost
from trainer.supervise.context import SupervisorContext
from trainer.supervise.coordinate.coordinator_host import CoordinatorHost
from trainer.supervise.coordinate.diagnosis import Missing
from trainer.supervise.ending import Ending
from trainer.supervise.messages import Orphaned, Roster
from trainer.supervise.rank.own_rank import OwnRank

ORPHAN_S = 0.2
"""Seconds that a supervisor without a parent waits for an end that may be on its way.

Open MPI 5 leaves it half a second in all.
"""
REJOIN_FACTOR, REJOIN_S = 3.0, 15.0
"""Time for which a supervisor looks for another way to the coordinator.

It is so many `timeouts.silence_s` and so many seconds more.
"""


class ParentLoss:
    """Handles the loss of the supervisor above one supervisor."""

    def __init__(
        self, context: SupervisorContext, own: OwnRank, ending: Ending, host: CoordinatorHost
    ) -> None:
        self._context, self._own, self._ending, self._host = context, own, ending, host
        self.roster: Roster | None = None
        """Members of the run as the coordinator has told them last; None if it has not."""
        self._rejoining = False
        self._orphaned = False

    def handle(self, lost: Orphaned) -> None:
        """Handles the loss of the supervisor above, or of one further up (`relayed`)."""
        if self._context.keeps_going and self.roster is not None and not lost.cut:
            if self._host.coordinator is None and not self._rejoining:
                self._rejoining = not lost.relayed
                self._context.spawn(self._rejoin(lost))
        elif not self._orphaned:
            self._orphaned = True
            self._context.spawn(self._leave(lost))

    async def _rejoin(self, lost: Orphaned) -> None:
        """Ends the rank at once, since others may go on without it, and finds another way to the coordinator.

        If this supervisor is the next in the order of succession, it takes the coordinator's place.
        """
        tree, own, limits = self._context.tree, self._own, self._context.limits
        assert tree is not None
        if lost.relayed:  # the one above looks for another way
            await own.end_before(own.latest + 1)
            return
        # Both at once: the others wait for this supervisor, and for its rank's end.
        ending = None if own.generation is None else asyncio.ensure_future(own.generation.end())
        roster = self.roster
        assert roster is not None
        tree.lose_parent()
        try:
            dead = await tree.rejoin(roster.succession, REJOIN_FACTOR * limits.silence_s + REJOIN_S)
        except TimeoutError:
            self._ending.end_cut_off(EXIT_FAILED, f"rank {lost.member} on {lost.node}")
            return
        finally:
            self._rejoining = False
        if ending is not None:
            await ending  # what `Joined` says of the rank must be true when it is sent
        if dead is None:
            tree.ask_to_join_again()
        else:
            await self._host.take_over(roster, own.ran, own.latest, sorted(dead))

    async def _leave(self, lost: Orphaned) -> None:
        """Ends this rank after its parent in the tree is gone.

        If the coordinator's decision arrives first, that counts instead.
        """
        await asyncio.sleep(ORPHAN_S)
        its = self._own.generation
        code = its.rank.poll() if its is not None else None
        late = self._own.state().late
        own = EXIT_TIMED_OUT if late else code if code is not None and code > 0 else EXIT_FAILED
        if lost.relayed:  # the supervisor that lost its own parent reports it
            self._ending.end(own)
        elif lost.cut:
            self._ending.end_cut_off(own, f"rank {lost.member} on {lost.node}")
        else:
            reason = supervisor_lost(lost.reason)
            await self._ending.end_alone(own, reason, Missing(lost.member, lost.node))
