"""Way of one supervisor to the coordinator: runs it if it is elected, and finds it again if it is lost.

Rank 0's supervisor begins with it; if that is lost, another one makes a new one. Where the launcher keeps the
others going, a rank whose supervisor has lost the one above it in the tree ends at once, and its supervisor
calls the coordinator or takes its place. Elsewhere the supervisor ends with the run. No torch.
"""

import asyncio
from collections.abc import Callable, Sequence

from trainer.errors import EXIT_FAILED, EXIT_TIMED_OUT
from trainer.run.exit_record import supervisor_lost
from trainer.supervise.context import SupervisorContext
from trainer.supervise.coordinate.coordinator import Coordinator
from trainer.supervise.coordinate.diagnosis import Missing, cut_off
from trainer.supervise.coordinate.membership import Membership
from trainer.supervise.coordinate.run_state import RunState
from trainer.supervise.ending import Ending
from trainer.supervise.messages import Message, Orphaned, Roster
from trainer.supervise.rank.own_rank import OwnRank
from trainer.world.launchers import number_of_spares


class CoordinatorHost:
    """Runs the coordinator in one supervisor."""

    def __init__(
        self,
        context: SupervisorContext,
        own: OwnRank,
        ending: Ending,
        send_down: Callable[[Message], None],
    ) -> None:
        """`send_down` sends a message to every supervisor, this one included."""
        self._context, self._own, self._ending, self._send_down = context, own, ending, send_down
        self.coordinator: Coordinator | None = None
        """The run's coordinator; None if it is elsewhere."""

    def take(self) -> Coordinator:
        """Makes this supervisor's coordinator, and returns it."""
        world, limits, env = self._context.world, self._context.limits, self._context.env
        alone = self._context.tree is None
        ranks = (world.rank,) if alone else range(world.size - number_of_spares(world, env))
        per_node = max(1, min(world.local_size, len(ranks)))
        fewest = len(ranks) if limits.min_nodes is None else min(len(ranks), limits.min_nodes * per_node)
        members = (world.rank,) if alone else range(world.size)
        membership = Membership(members, len(ranks), fewest, limits.world_sizes, even_nodes=limits.even_nodes)
        run = RunState(self._context, self._own, self._ending, self._send_down, membership, ranks)
        self.coordinator = Coordinator(run)
        return self.coordinator

    async def take_over(self, roster: Roster, ran: int, latest: int, dead: Sequence[int]) -> None:
        """Makes the coordinator in the place of a lost one; the processes of `dead` are surely gone.

        `ran` is the last generation that was started, and `latest` the highest number that was heard of.
        """
        coordinator = self.take()
        assert self._context.tree is not None
        self._context.tree.ask_to_join_again()
        await coordinator.take_over(roster, ran, max(latest, roster.generation), dead)

    def receive(self, message: Message) -> None:
        """Handles a message to the coordinator, if it is here."""
        if self.coordinator is not None:
            self.coordinator.receive(message)


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
            self._ending.end_without_record(EXIT_FAILED, cut_off(f"rank {lost.member} on {lost.node}"))
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
        code = its.poll() if its is not None else None
        late = self._own.state().late
        own = EXIT_TIMED_OUT if late else code if code is not None and code > 0 else EXIT_FAILED
        if lost.relayed:  # the supervisor that lost its own parent reports it
            self._ending.end(own)
        elif lost.cut:
            self._ending.end_without_record(own, cut_off(f"rank {lost.member} on {lost.node}"))
        else:
            # One that has had no rank is no part of the run, which the others may go on with.
            end = self._ending.end_unjoined if its is None else self._ending.end_alone
            await end(own, supervisor_lost(lost.reason), Missing(lost.member, lost.node))
