"""Runs the coordinator if this supervisor is elected, and connects it with the supervisor.

Rank 0's supervisor begins with it; if that is lost, another one makes a new one. It also sends the roster, by
which all know who that would be. No torch.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from trainer.errors import EXIT_DONE, EXIT_START_AGAIN
from trainer.run.exit_record import ExitRecord
from trainer.run.generations import GenerationClaim
from trainer.supervise.context import SupervisorContext
from trainer.supervise.coordinate.coordinator import Coordinator
from trainer.supervise.coordinate.membership import Membership, runs_text
from trainer.supervise.coordinate.run_state import RunState
from trainer.supervise.ending import Ending
from trainer.supervise.messages import SUCCESSORS, End, Message, Roster
from trainer.supervise.network.link import is_refused
from trainer.supervise.network.tree_plan import Address
from trainer.supervise.rank.own_rank import OwnRank
from trainer.sysinfo.addresses import is_loopback
from trainer.text.terminal import shown
from trainer.world.launchers import number_of_spares
from trainer.world.state_folder import newest_kept
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
            Membership(members, len(ranks), fewest, limits.world_sizes),
            member=world.rank,
            keeps_going=self._context.keeps_going,
            respawns=bool(env.get(RESPAWNS)),
            starts_again=env.get(STARTS_AGAIN, ""),
            generation=world.generation,
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
        return newest_kept(self._context.env)

    def say(self, line: str) -> None:
        print(shown(line), file=sys.stderr, flush=True)

    async def fresh_variables(self) -> Mapping[str, str]:
        return await self._own.choose_meeting()

    def below(self, member: int) -> set[int]:
        return self._context.tree.plan.below(member) if self._context.tree is not None else set()

    def leave(self, other: str) -> None:
        self._ending.leave_cut_off(other)

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
        return await is_refused(address)

    def forget(self, member: int) -> None:
        if self._context.tree is not None:
            self._context.tree.plan.forget(member)
            self._context.tree.drop(member)

    def members_changed(self) -> None:
        self._changed_at = time.monotonic()
        if self._context.keeps_going and not self._roster_due:
            self._roster_due = True
            self._context.spawn(self._send_roster())

    async def _send_roster(self) -> None:
        """Tells all supervisors who is there, when nobody has come or gone for ROSTER_S."""
        latest = time.monotonic() + ROSTER_LATEST_S
        while self._changed_at + ROSTER_S > time.monotonic() < latest:
            await asyncio.sleep(max(0.01, self._changed_at + ROSTER_S - time.monotonic()))
        self._roster_due = False
        tree = self._context.tree
        if self.coordinator is None or tree is None or self._ending.code is not None:
            return
        generation, world, members = self.coordinator.members
        here = (self._context.world.rank, self._context.address)
        succession = (here, *tree.plan.successors(SUCCESSORS))
        beside = tuple(tree.plan.on_node(self._context.world.node)[:_BESIDE])
        others = "" if members == world.members else runs_text(members)
        tree.down(Roster(generation, world.to_text(), others, succession, beside))
