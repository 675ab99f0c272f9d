"""Loss of the supervisor above in the tree: finds another way to the coordinator, or ends.

Where the launcher keeps the others going, the rank ends at once and its supervisor calls the coordinator, or
takes its place. Elsewhere the supervisor ends with the run. No torch.
"""

import asyncio

from trainer.errors import EXIT_FAILED, EXIT_TIMED_OUT
from trainer.run.exit_record import supervisor_lost
from trainer.supervise.context import SupervisorContext
from trainer.supervise.coordinate.actions import Message
from trainer.supervise.coordinate.coordinator_host import CoordinatorSeat
from trainer.supervise.coordinate.diagnosis import Missing
from trainer.supervise.ending import Ending
from trainer.supervise.network.roster import Roster
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
        self, context: SupervisorContext, own: OwnRank, ending: Ending, seat: CoordinatorSeat
    ) -> None:
        self._context, self._own, self._ending, self._seat = context, own, ending, seat
        self.roster_message: Message | None = None
        """Latest roster, as the coordinator has sent it."""
        self._rejoining = False
        self._orphaned = False

    @property
    def roster(self) -> Roster | None:
        """Members of the run as this supervisor knows them; None if it has not heard of them."""
        return None if self.roster_message is None else Roster.from_message(self.roster_message)

    def handle(self, lost: Message) -> None:
        """Handles the loss of the supervisor above, or of one further up (`relayed`)."""
        if self._context.keeps_going and self.roster_message is not None and not lost["cut"]:
            if self._seat.coordinator is None and not self._rejoining:
                self._rejoining = not lost["relayed"]
                self._context.spawn(self._rejoin(lost))
        elif not self._orphaned:
            self._orphaned = True
            self._context.spawn(self._leave(lost))

    async def _rejoin(self, lost: Message) -> None:
        """Ends the rank at once, since others may go on without it, and finds another way to the coordinator.

        If this supervisor is the next in the order of succession, it takes the coordinator's place.
        """
        tree, own, limits = self._context.tree, self._own, self._context.limits
        assert tree is not None
        if lost["relayed"]:  # the one above looks for another way
            await own.end_before(own.latest + 1)
            return
        ending = None if own.generation is None else asyncio.ensure_future(own.generation.end())
        roster = self.roster
        assert roster is not None
        tree.lose_parent()
        try:
            dead = await tree.rejoin(roster.succession, REJOIN_FACTOR * limits.silence_s + REJOIN_S)
        except TimeoutError:
            self._ending.end_cut_off(EXIT_FAILED, f"rank {lost['rank']} on {lost['node']}")
            return
        finally:
            self._rejoining = False
        if ending is not None:
            await ending
        if dead is None:
            tree.call_roll()
        else:
            await self._seat.take_over(roster, own.ran, own.latest, sorted(dead))

    async def _leave(self, lost: Message) -> None:
        """Ends this rank after its parent in the tree is gone.

        If the coordinator's decision arrives first, that counts instead.
        """
        await asyncio.sleep(ORPHAN_S)
        its = self._own.generation
        code = its.rank.poll() if its is not None else None
        late = self._own.state().late
        own = EXIT_TIMED_OUT if late else code if code is not None and code > 0 else EXIT_FAILED
        if lost["relayed"]:  # the supervisor that lost its own parent reports it
            self._ending.end(own)
        elif lost["cut"]:
            self._ending.end_cut_off(own, f"rank {lost['rank']} on {lost['node']}")
        else:
            reason = supervisor_lost(lost["reason"])
            await self._ending.end_alone(own, reason, Missing(lost["rank"], lost["node"]))
