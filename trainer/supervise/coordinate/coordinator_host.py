"""Way of one supervisor to the coordinator: runs it if it is elected, and finds it again if it is lost.

Rank 0's supervisor begins with it; if that is lost, another one makes a new one. It also sends the roster, by
which all know who that would be. Where the launcher keeps the others going, a rank whose supervisor has lost
the one above it in the tree ends at once, and its supervisor calls the coordinator or takes its place.
Elsewhere the supervisor ends with the run. No torch.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_START_AGAIN, EXIT_TIMED_OUT
from trainer.run.exit_record import ExitRecord, supervisor_lost
from trainer.run.generations import GenerationClaim
from trainer.supervise.context import SupervisorContext
from trainer.supervise.coordinate.coordinator import Coordinator
from trainer.supervise.coordinate.diagnosis import Missing, cut_off
from trainer.supervise.coordinate.membership import Membership, runs_text
from trainer.supervise.coordinate.run_state import RunState
from trainer.supervise.ending import Ending
from trainer.supervise.machine import now
from trainer.supervise.messages import SUCCESSORS, End, Message, Orphaned, Roster
from trainer.supervise.network.link import is_refused
from trainer.supervise.network.tree_plan import Address
from trainer.supervise.rank.own_rank import OwnRank
from trainer.sysinfo.addresses import is_loopback
from trainer.world.launchers import number_of_spares
from trainer.world.variables import RESPAWNS, STARTS_AGAIN

ROSTER_S, ROSTER_LATEST_S = 0.7, 10.0
"""Seconds without news after which a roster is sent, and the seconds after which it is sent in any case."""
_BESIDE = 64
"""Most members of the coordinator's node that a roster has with their addresses."""


class CoordinatorHost:
    """Runs the coordinator in one supervisor, and does what it asks: it has the methods of `Actions`."""

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
        self._addresses: Mapping[int, Address] = {}
        """Addresses of members as the coordinator before this one knew them."""
        self._roster_due = False
        self._changed_at = 0.0
        """Time at which a member has come or gone."""

    def take(self) -> Coordinator:
        """Makes this supervisor's coordinator, and returns it."""
        world, limits, env = self._context.world, self._context.limits, self._context.env
        alone = self._context.tree is None
        ranks = (world.rank,) if alone else range(world.size - number_of_spares(world, env))
        per_node = max(1, min(world.local_size, len(ranks)))
        fewest = len(ranks) if limits.min_nodes is None else min(len(ranks), limits.min_nodes * per_node)
        members = (world.rank,) if alone else range(world.size)
        run = RunState(
            ranks,
            limits,
            self._context.exit_files,
            self,
            Membership(members, len(ranks), fewest, limits.world_sizes, even_nodes=limits.even_nodes),
            member=world.rank,
            keeps_going=self._context.keeps_going,
            respawns=bool(env.get(RESPAWNS)),
            starts_again=env.get(STARTS_AGAIN, ""),
            generation=world.generation,
            machine=self._context.machine,
        )
        self.coordinator = Coordinator(run)
        return self.coordinator

    async def take_over(self, roster: Roster, ran: int, latest: int, dead: Sequence[int]) -> None:
        """Makes the coordinator in the place of a lost one; the processes of `dead` are surely gone.

        `ran` is the last generation that was started, and `latest` the highest number that was heard of.
        """
        coordinator = self.take()
        self._addresses = roster.addresses
        assert self._context.tree is not None
        self._context.tree.ask_to_join_again()
        await coordinator.take_over(roster, ran, max(latest, roster.generation), dead)

    def receive(self, message: Message) -> None:
        """Handles a message to the coordinator, if it is here."""
        if self.coordinator is not None:
            self.coordinator.receive(message)

    # What the coordinator asks for, see `Actions`.

    @property
    def can_restart(self) -> bool:
        """True if the coordinator reaches all ranks: only those can be started again."""
        return self._context.tree is not None or self._context.world.size == 1

    @property
    def can_claim(self) -> bool:
        """True if there may be others."""
        return self._context.tree is not None

    def broadcast(self, message: Message) -> None:
        self._send_down(message)

    def steps_done(self) -> float:
        return self._own.state().steps_done

    def has_begun(self) -> bool:
        return self._own.has_begun

    def moments(self) -> Mapping[str, float]:
        return self._own.moments()

    def in_memory(self) -> int:
        return self._context.machine.newest_kept(self._context.env)

    def say(self, line: str) -> None:
        self._context.machine.say(line)

    async def fresh_variables(self) -> Mapping[str, str]:
        return await self._own.choose_meeting()

    def below(self, member: int) -> set[int]:
        return self._context.tree.plan.below(member) if self._context.tree is not None else set()

    def leave(self, reason: str) -> None:
        self._ending.leave(reason)

    def finish(self, record: ExitRecord) -> None:
        """Ends the run.

        Every rank leaves with the cause's exit code, so that no launcher can choose another.
        """
        if record.exit_code not in (EXIT_DONE, EXIT_START_AGAIN):
            self._ending.show(record)
        if self._context.tree is not None:
            self._context.tree.ending = True
        self._send_down(End(record.exit_code))

    async def claim(self, generation: int, world: str) -> GenerationClaim | None:
        assert self._context.tree is not None
        host, port = self._context.address
        start, own = self._context.tree.rendezvous.start, self._context.world
        return await self._context.exit_files.claim(
            GenerationClaim(start, generation, own.rank, own.node, host, port, world)
        )

    async def is_gone(self, member: int) -> bool:
        tree = self._context.tree
        address = None if tree is None else tree.plan.address(member) or self._addresses.get(member)
        if tree is None or address is None:
            return False
        # A loopback address that another machine has told would be asked here.
        if is_loopback(address[0]) and not is_loopback(tree.rendezvous.host):
            return False
        return await is_refused(address, self._context.machine)

    def forget(self, member: int) -> None:
        if self._context.tree is not None:
            self._context.tree.plan.forget(member)
            self._context.tree.drop(member)

    def members_changed(self) -> None:
        self._changed_at = now()
        if self._context.keeps_going and not self._roster_due:
            self._roster_due = True
            self._context.spawn(self._send_roster_when_quiet())

    def generation_started(self) -> None:
        # A supervisor without a roster cannot go on without this one, and ends the run.
        if self._context.keeps_going:
            self._send_roster()

    async def _send_roster_when_quiet(self) -> None:
        """Tells all supervisors who is there, when nobody has come or gone for ROSTER_S."""
        latest = now() + ROSTER_LATEST_S
        while self._changed_at + ROSTER_S > now() < latest:
            await asyncio.sleep(max(0.01, self._changed_at + ROSTER_S - now()))
        self._roster_due = False
        self._send_roster()

    def _send_roster(self) -> None:
        tree = self._context.tree
        if self.coordinator is None or tree is None or self._ending.code is not None:
            return
        generation, world, members = self.coordinator.members
        here = (self._context.world.rank, self._context.address)
        succession = (here, *tree.plan.successors(SUCCESSORS))
        beside = tuple(tree.plan.on_node(self._context.world.node)[:_BESIDE])
        others = "" if members == world.members else runs_text(members)
        tree.down(Roster(generation, world.to_text(), others, succession, beside))


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
