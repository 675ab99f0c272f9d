"""Which members are there, gone or beyond a cut, and which part of a cut network goes on.

The coordinator's part of it; `membership` holds the result, and a roster tells all supervisors of it: so they
know who goes on in the coordinator's place.

Each coordinator claims the number of the generation in the run folder, see `trainer.run.generations`, and
waits first until the ranks of silent members have surely been ended.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence

from trainer.run.generations import GenerationClaim
from trainer.supervise.coordinate.diagnosis import cut_off
from trainer.supervise.coordinate.generation_state import GenerationState
from trainer.supervise.coordinate.membership import WorldPlan, place_in, runs_text
from trainer.supervise.coordinate.run_state import RunState, StorageRetry
from trainer.supervise.machine import now
from trainer.supervise.messages import SUCCESSORS, Lost, Roster
from trainer.supervise.network.link import is_refused
from trainer.supervise.network.tree_plan import Address
from trainer.sysinfo.addresses import is_loopback

REGROUP_S = 30.0
"""Longest wait, in seconds, for every supervisor to confirm that its rank has ended before a restart."""
ORPHANS_S = 4.0
"""Longest wait, in seconds, for a supervisor to find another way after the one above it is gone.

One whose machine refuses calls to it has ended, and is not waited for.
"""

ROSTER_S, ROSTER_LATEST_S = 0.7, 10.0
"""Seconds without news after which a roster is sent, and the seconds after which it is sent in any case."""
FENCE_S = 3.0
"""Seconds from the silence of a supervisor until its rank has surely been ended by itself.

Both sides of a connection wait for `timeouts.silence_s`, and each looks once a second.
"""
_BESIDE = 64
"""Most members of the coordinator's node that a roster has with their addresses."""


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
        self._addresses: Mapping[int, Address] = {}
        """Addresses of members as the coordinator before this one knew them."""
        self._roster_due = False
        self._changed_at = 0.0
        """Time at which a member has come or gone."""

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
        self._members_changed()

    def lose(self, member: int, *, silent: bool) -> None:
        """Counts a member as gone. Those below it in the tree have ORPHANS_S to find another way.

        They are of its own node, so they may have ended with it, which their machine tells.
        """
        run = self._run
        orphans = {other for other in self._below(member) if other in run.membership.living}
        run.membership.lose(member)
        self._orphans.discard(member)
        if (tree := run.context.tree) is not None:
            tree.plan.forget(member)
            tree.drop(member)
        if silent:
            self.unreachable[member] = now()
        if orphans := orphans - self._orphans:
            self._orphans |= orphans
            run.spawn(self._lose_orphans(orphans))
            self._lose_ended(orphans, self._orphans)
        self._members_changed()

    def _lose_ended(self, members: Iterable[int], waited_for: set[int]) -> None:
        """Stops waiting for those of the members whose processes have ended; `waited_for` holds them."""
        for member in members:
            self._run.spawn(self._lose_if_ended(member, waited_for))

    async def _lose_if_ended(self, member: int, waited_for: set[int]) -> None:
        if await self._is_gone(member) and member in waited_for:
            if member in self._run.membership.living:
                reason = "its machine refuses calls to it"
                self._run.post(Lost(member, self._run.membership.nodes[member], reason))
            else:
                waited_for.discard(member)

    def _below(self, member: int) -> set[int]:
        """Returns the members whose way to this supervisor leads through that one."""
        tree = self._run.context.tree
        return set() if tree is None else tree.plan.below(member)

    async def _is_gone(self, member: int) -> bool:
        """Returns whether a member's process has surely ended, since its machine refuses calls to it.

        It takes at most some seconds. False: it may live, or its machine is gone.
        """
        context = self._run.context
        tree = context.tree
        address = None if tree is None else tree.plan.address(member) or self._addresses.get(member)
        if tree is None or address is None:
            return False
        # A loopback address that another machine has told would be asked here.
        if is_loopback(address[0]) and not is_loopback(tree.rendezvous.host):
            return False
        return await is_refused(address, context.machine)

    async def _lose_orphans(self, orphans: set[int]) -> None:
        self._joined_at = now()  # the wait begins anew with each that comes
        while orphans & self._orphans and now() < self._joined_at + ORPHANS_S:
            await asyncio.sleep(0.1)  # in a large run they come one after the other
        for member in sorted(orphans & self._orphans):
            reason = "it has not come back since the supervisor above it was lost"
            # One that is stopped has not ended its rank, which lives as long as its lease.
            self._run.post(Lost(member, self._run.membership.nodes[member], reason, silent=True))

    def take_over(self, roster: Roster, dead: Sequence[int]) -> None:
        """Counts the members of an earlier coordinator that are not here as gone for now.

        It is the first of the roster's succession. Those whose processes are not `dead` are awaited.
        """
        root, self._addresses = roster.succession[0][0], roster.addresses
        members = [each for each in roster.members if each[0] != self._run.member]
        here = self._run.membership.living
        for member, node in members:
            if member not in here:
                self._run.membership.join(member, node)
                self._run.membership.lose(member)
                if member not in dead and member != root:
                    self._awaited.add(member)
                if root not in dead:
                    self.unreachable[member] = now()
        self._lose_ended(self._awaited & self._addresses.keys(), self._awaited)

    async def all_ended(self, its: GenerationState) -> None:
        """Waits until nobody is awaited and all who are there have ended their ranks.

        Those who do not come or do not end in time count as lost.
        """
        run = self._run
        self._joined_at, limit = now(), now() + REGROUP_S
        patience = ORPHANS_S + (run.limits.silence_s if self.unreachable else 0.0)

        def settled() -> bool:
            waiting = self._orphans or (self._awaited and now() < self._joined_at + patience)
            return not waiting and its.ended >= set(run.membership.living)

        await run.until(settled, max(REGROUP_S, patience))
        self.unreachable |= dict.fromkeys(self._awaited, now())  # they may be stopped, and their ranks live
        self._awaited.clear()
        if now() >= limit:
            for member in set(run.membership.living) - its.ended:
                self._stuck.add(member)
                self.lose(member, silent=True)

    def _members_changed(self) -> None:
        self._changed_at = now()
        if self._run.keeps_going and not self._roster_due:
            self._roster_due = True
            self._run.spawn(self._send_roster_when_quiet())

    async def _send_roster_when_quiet(self) -> None:
        """Tells all supervisors who is there, when nobody has come or gone for ROSTER_S."""
        latest = now() + ROSTER_LATEST_S
        while self._changed_at + ROSTER_S > now() < latest:
            await asyncio.sleep(max(0.01, self._changed_at + ROSTER_S - now()))
        self._roster_due = False
        self.send_roster()

    def send_roster(self) -> None:
        """Tells all supervisors who is there, if they can go on without this one."""
        run = self._run
        context, tree = run.context, run.context.tree
        if tree is None or not run.keeps_going:
            return
        world, members = run.world, run.members
        here = (run.member, context.address)
        succession = (here, *tree.plan.successors(SUCCESSORS))
        beside = tuple(tree.plan.on_node(context.world.node)[:_BESIDE])
        others = "" if members == world.members else runs_text(members)
        tree.down(Roster(run.generation.number, world.to_text(), others, succession, beside, run.ran))


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

    async def is_ours(
        self, its: GenerationState, world: WorldPlan | None = None, *, patient: bool = True
    ) -> bool:
        """Claims the generation; if another part of a cut network has it, this part leaves the run.

        `world` is what it starts; None if the run ends. `patient` allows the run folder the time to answer
        that a start has.

        The smaller part waits first, so that the larger one comes before it; of two equal ones, the part
        that has lost its coordinator counts as the smaller. The claim of another member is passed over only
        if its generation cannot run without a rank of this supervisor, which never heard of it, or if that
        was a coordinator before this one and is surely dead: a closed connection does not show which of the
        two was cut off, or was stopped for a while.
        """
        run, unreachable = self._run, self._presence.unreachable
        text = "" if world is None else world.to_text()
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
                what = f"generation {number}" if patient else "the run's end"
                run.leave(f"the run folder takes no claim of {what}: {error.strerror or error}")
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
        if other.member == self._run.member:
            return True
        is_dead = other.member in self._dead and other.generation <= self._claimed_before
        return is_dead or place_in(other.world, self._run.member) is not None
