"""Connections between supervisors: a tree of TCP connections, apart from the ranks' own.

Messages go up to rank 0's supervisor and down to all. Every supervisor calls the root first. The root keeps
the first of each node, and sends the others on to the first of theirs. So the root has a neighbour for each
node, and the others have those of their own. If a supervisor is lost, those below it ask the root again; if
that is the root, the next living one of a list that all know takes its place. News that every supervisor
sends, such as that it has joined, is collected on the way up. A message is a line of JSON. Both sides of a
connection prove that they know the run's token, by HMACs over fresh numbers of both; the token never travels.
Each supervisor listens only at the address by which the others reach it. No torch.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from trainer.supervise import messages
from trainer.supervise.background import spawn
from trainer.supervise.machine import Machine, now
from trainer.supervise.messages import Message
from trainer.supervise.network.link import BEAT, OUTSIDER, Link
from trainer.supervise.network.tree_plan import Address, TreePlan
from trainer.world.rendezvous import Message as Table
from trainer.world.rendezvous import Rendezvous, is_signed, signed

HEARTBEAT_S = 1.0
HANDSHAKE_S = 5.0
REJOIN_CALL_S = 2.0
"""Longest wait for the answer of a supervisor that may be the new root."""
COLLECT_S = 0.05
"""Seconds for which messages that every supervisor sends are collected on their way up."""
_HUNG_UP = 3
"""Calls that a supervisor may cut off before it counts as one that may live."""
_NoParent = Literal["refused", "hung up", "silent", "no root"]
_COLLECTED = (messages.Joined, messages.Ended, messages.Done)
_MOST_COLLECTED = 500


class Tree:
    """One supervisor's place in the tree. Callbacks run in the event loop and must not wait."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        node: str,
        silence_s: float,
        machine: Machine,
        *,
        late: bool = False,
    ) -> None:
        """`rank` is the supervisor's number. With `late` it takes a lost one's place and is no root."""
        self.rendezvous, self.rank, self.node = rendezvous, rank, node
        self.is_root = rank == 0 and not late
        self.about: Callable[[], messages.Joined] = lambda: messages.Joined(rank, node)
        """Returns what this supervisor says of itself when it joins, for example that it has no rank."""
        self.at_root: Callable[[Message], None] = lambda message: None
        """Callback at the root for each message from below."""
        self.from_above: Callable[[Message], None] = lambda message: None
        """Callback for each message from the root, and for `Orphaned` when the supervisor above is gone."""
        self.before_first: Callable[[], Awaitable[object]] | None = None
        """Function that is awaited before the first other supervisor is answered."""
        self._first: asyncio.Future[object] | None = None
        self.ending = False
        """True once the run is ending: links that close from now on are not reported."""
        self._silence_s, self._machine = silence_s, machine
        self.plan = TreePlan(node)
        """Plan of the tree; only the root's counts."""
        self._collected: list[Message] = []
        self._parent: Link | None = None
        self._unsent: list[Message] = []
        self._children: dict[Link, None] = {}
        """In the order in which they have come: a set would have another in each process."""
        self._servers: dict[str | None, asyncio.Server] = {}
        """Servers by the address at which each listens."""
        self._stranger = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(
        self, timeout_s: float, roots: Callable[[], Awaitable[Sequence[Address]]] | None = None
    ) -> None:
        """Listens and finds a parent.

        `roots` returns addresses at which the root may be, before the rendezvous is tried. Raises OSError if
        the port is taken, and TimeoutError if nobody answers in time.
        """
        if self.is_root:
            host = await self._machine.listening_address(self.rendezvous.host)
            await self._listen(host, self.rendezvous.port)
        else:
            self._take_parent(await self._find_parent(now() + timeout_s, roots))
        self._spawn(self._send_heartbeats())

    async def rejoin(self, successors: Sequence[tuple[int, Address]], timeout_s: float) -> set[int] | None:
        """Finds a new way to the root after the parent is gone.

        `successors` are numbers and addresses, the present root's first. Returns None if there is a new
        parent. If this supervisor is the next that lives, it is the root from now on; then returns the
        numbers of those before it whose processes are surely gone; the others may only be unreachable. Raises
        TimeoutError if neither happens in time.
        """
        deadline = now() + timeout_s
        hung_up: Counter[int] = Counter()
        while True:
            dead: set[int] = set()
            for number, address in successors:
                if number == self.rank:
                    self._become_root()
                    return dead
                answer = await self._call_successor(address)
                if isinstance(answer, Link):
                    self._take_parent(answer)
                    return None
                hung_up[number] += answer == "hung up"
                # It lives and may not know yet that it is the next root; or it is just being killed, and the
                # kernel refuses the next call.
                if answer == "no root" or (answer == "hung up" and hung_up[number] < _HUNG_UP):
                    break
                dead |= {number} if answer == "refused" else set()
            if now() > deadline:
                raise TimeoutError("no supervisor answers")
            await asyncio.sleep(0.2)  # the next root may not have noticed the loss yet

    def _become_root(self) -> None:
        self.is_root = True
        self.plan = TreePlan(self.node)
        unsent, self._unsent = [*self._collected, *self._unsent], []
        self._collected.clear()
        for message in unsent:
            self.at_root(message)

    async def _call_successor(self, address: Address) -> Link | _NoParent:
        """Returns a link to a parent that a supervisor names, or what the call met instead."""
        try:
            async with asyncio.timeout(REJOIN_CALL_S):
                met = await self._meet(address, seeks_root=True)
        except OSError as error:  # TimeoutError is one
            if isinstance(error, ConnectionRefusedError):
                return "refused"
            return "hung up" if isinstance(error, ConnectionError) else "silent"
        if met is None:
            return "hung up"
        link, answer = met
        if answer["root"] and answer["parent"] is None:
            return link
        link.close()
        parent = (await self._call(_address(answer["parent"])))[0] if answer["root"] else None
        return "no root" if parent is None else parent

    async def _meet(self, address: Address, *, seeks_root: bool) -> tuple[Link, Table] | None:
        """Returns a link to a supervisor, and its answer; None if it hangs up or is a stranger.

        Raises OSError.
        """
        link = Link(*await self._machine.connect(address))
        port = await self._listen(link.own_host(), 0) if seeks_root else 0
        answer = await self._introduce(link, port, seeks_root=seeks_root)
        if answer is None:
            link.close()
            return None
        link.rank, link.node = int(answer["rank"]), str(answer["node"])
        return link, answer

    def _take_parent(self, link: Link) -> None:
        self._parent = link
        self._spawn(self._receive_from_parent(link))
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            self.up(message)

    def lose_parent(self) -> None:
        """Closes the link to the parent; until there is another, messages to the root wait."""
        if self._parent is not None:
            self._parent.close()
            self._parent = None

    def drop(self, rank: int) -> None:
        """Disconnects a child, which leaves; its messages are ignored."""
        for link in [link for link in self._children if link.rank == rank]:
            self._children.pop(link, None)
            link.close()

    @property
    def address(self) -> Address:
        """Address at which this supervisor listens; ("", 0) before it does."""
        for host, server in self._servers.items():
            port = int(server.sockets[0].getsockname()[1])
            return (self.rendezvous.host if host is None else host), port
        return "", 0

    @property
    def has_parent(self) -> bool:
        """True while there is a way to the root."""
        return self._parent is not None

    def ask_to_join_again(self) -> None:
        """Lets this supervisor and all below it say again that they are there."""
        above = self._parent.rank if self._parent is not None else self.rank
        self.up(replace(self.about(), address=self.address, above=above))
        for child in self._children:
            child.send(messages.JoinAgain())

    def up(self, message: Message) -> None:
        """Sends a message to the root; the root handles its own at once."""
        if self.is_root:
            for each in _single(message):
                self._hear(each)
        elif self._parent is None:
            self._unsent.append(message)
        elif isinstance(message, (*_COLLECTED, messages.Several)):
            # All members send these at about the same time: one line for many keeps the root's work small.
            if not self._collected:
                asyncio.get_running_loop().call_later(COLLECT_S, self._send_collected)
            self._collected += _single(message)
            if len(self._collected) >= _MOST_COLLECTED:
                self._send_collected()
        else:
            self._send_collected()  # nothing overtakes what was sent before it
            self._parent.send(message)

    def _hear(self, message: Message) -> None:
        if isinstance(message, messages.Joined) and message.above is not None and message.member != self.rank:
            assert message.address is not None
            self.plan.adopt(message.member, message.node, message.address, message.above)
        self.at_root(message)

    def _send_collected(self) -> None:
        """Sends what was collected as few messages; a single one stays as it is."""
        if not self._collected:
            return
        if self._parent is None:
            self._unsent, self._collected = [*self._collected, *self._unsent], []
            return
        for first in range(0, len(self._collected), _MOST_COLLECTED):
            several = tuple(self._collected[first : first + _MOST_COLLECTED])
            self._parent.send(several[0] if len(several) == 1 else messages.Several(several))
        self._collected = []

    def down(self, message: Message) -> None:
        """Sends a message to every supervisor below, and handles it here."""
        if self._children:
            line = messages.to_line(message)
            for child in self._children:
                child.send_line(line)
        self.from_above(message)

    async def leave(self) -> None:
        """Sends what is still to be sent, and closes all connections."""
        self.ending = True
        if not self.is_root:
            self._send_collected()
        links = [*self._children, *([self._parent] if self._parent else [])]
        with suppress(TimeoutError):  # a neighbour that is stopped takes nothing, and must not keep this one
            async with asyncio.timeout(HEARTBEAT_S):
                await asyncio.gather(*(link.flush() for link in links))
        for link in links:
            link.close()
        for task in self._tasks:
            task.cancel()
        for server in self._servers.values():
            server.close()
        if links:
            closing = [asyncio.ensure_future(link.closed()) for link in links]
            await asyncio.wait(closing, timeout=HEARTBEAT_S)

    def _spawn(self, work: Any) -> None:
        spawn(work, self._tasks)

    async def _listen(self, host: str | None, port: int) -> int:
        """Listens at one address of this machine, or at all of them if it is None; returns the port."""
        if host not in self._servers:
            self._servers[host] = await self._machine.listen(self._newcomer, host, port)
        return int(self._servers[host].sockets[0].getsockname()[1])

    async def _find_parent(
        self, deadline: float, roots: Callable[[], Awaitable[Sequence[Address]]] | None
    ) -> Link:
        """Returns the link to this supervisor's parent, which the root names.

        If a parent does not answer, the root is asked again, until the deadline.
        """
        while True:
            others = [] if roots is None else await roots()
            for root in [*others, (self.rendezvous.host, self.rendezvous.port)]:
                link, parent = await self._call(root, is_root=True)
                if link is not None and parent is not None:
                    link.close()
                    link, parent = await self._call(parent)
                if link is not None and parent is None:
                    return link
            if now() > deadline:
                address = f"{self.rendezvous.host}, port {self.rendezvous.port}"
                another = (
                    ": another program answers there, which does not know this run's token"
                    if self._stranger
                    else ""
                )
                raise TimeoutError(f"rank 0's supervisor does not answer at {address}{another}")
            await asyncio.sleep(0.2)  # launchers start ranks in any order, and the root may come last

    async def _call(self, address: Address, *, is_root: bool = False) -> tuple[Link | None, Address | None]:
        """Returns a link that was welcomed, and the address of the parent to call instead, if any.

        `is_root` says that the root should be there.
        """
        met = None
        with suppress(OSError):  # TimeoutError is one
            async with asyncio.timeout(HANDSHAKE_S):
                met = await self._meet(address, seeks_root=is_root)
        if met is None:
            return None, None
        link, answer = met
        if is_root and not answer["root"]:
            link.close()
            return None, None
        return link, _address(answer["parent"]) if answer["parent"] else None

    async def _introduce(self, link: Link, port: int, *, seeks_root: bool) -> Table | None:
        """Introduces this supervisor; returns the answer, or None if the other side does not know the token.

        Newcomers reach this supervisor at `port`. If it seeks the root, no other one takes it for a child.
        """
        challenge = await link.receive_table()
        if challenge is None:
            return None
        nonces = str(challenge.get("nonce")), secrets.token_hex(16)
        hello = {"rank": self.rank, "node": self.node, "port": port, "nonce": nonces[1], "seeks": seeks_root}
        hello["joined"] = messages.to_table(self.about())
        link.send_table(signed(self.rendezvous.token, "newcomer", nonces, hello))
        answer = await link.receive_table()
        self._stranger = answer is not None and not is_signed(self.rendezvous.token, "host", nonces, answer)
        return None if self._stranger else answer

    async def _newcomer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link, welcome = Link(reader, writer), False
        with suppress(asyncio.CancelledError):  # this supervisor leaves; asyncio would print the error
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    welcome = await self._welcome(link)
            except (TimeoutError, ValueError, LookupError):
                pass  # it says no more, or nothing of sense
        if welcome:
            # As work of ours: what raises in it ends this supervisor, and asyncio would only print it.
            self._spawn(self._serve(link))
        else:
            link.close()

    async def _serve(self, link: Link) -> None:
        try:
            await self._receive_from_child(link)
        finally:
            link.close()

    async def _welcome(self, link: Link) -> bool:
        """Returns whether the caller is this supervisor's child, or only has a request.

        A caller that is neither has been told where to go.
        """
        nonce = secrets.token_hex(16)
        link.send_table({"nonce": nonce})
        hello = await link.receive_table()
        nonces = nonce, str(hello.get("nonce")) if hello else ""
        if hello is None or not is_signed(self.rendezvous.token, "newcomer", nonces, hello):
            return False
        link.rank, link.node = int(hello["rank"]), str(hello["node"])
        if link.rank != OUTSIDER:
            joined = messages.from_table(hello.get("joined"))
            link.joined = joined if isinstance(joined, messages.Joined) else None
        if self.before_first is not None and link.rank != OUTSIDER:
            self._first = self._first or asyncio.ensure_future(self.before_first())
            await asyncio.shield(self._first)
        parent = None
        if self.is_root and link.rank != OUTSIDER:
            parent = self.plan.parent(link.rank, link.node, (link.host(), int(hello["port"])))
        link.send_table(
            signed(
                self.rendezvous.token,
                "host",
                nonces,
                {"parent": parent, "rank": self.rank, "node": self.node, "root": self.is_root},
            )
        )
        await link.flush()
        return parent is None and (self.is_root or link.rank == OUTSIDER or not hello.get("seeks"))

    async def _receive_from_child(self, link: Link) -> None:
        if link.joined is not None:
            self.drop(link.rank)  # an earlier connection of the same one
            self._children[link] = None
            self.up(link.joined)
        while (message := await link.receive()) is not None:
            self.up(message)
        if link in self._children:
            self._children.pop(link, None)
            self._child_lost(link, "its connection closed")

    def _parent_gone(self, reason: str, *, cut: bool = False) -> None:
        assert self._parent is not None
        lost = messages.Orphaned(self._parent.rank, self._parent.node, reason, cut)
        for child in self._children:  # else they would notice only after a time limit of their own
            child.send(replace(lost, relayed=True))
        self.from_above(lost)

    def _child_lost(self, link: Link, reason: str, *, silent: bool = False) -> None:
        if not self.ending:
            self.up(messages.Lost(link.rank, link.node, reason, silent))

    async def _receive_from_parent(self, link: Link) -> None:
        while (message := await link.receive()) is not None:
            if isinstance(message, messages.JoinAgain):
                self.ask_to_join_again()
            else:
                self.down(message)
        if not self.ending and link is self._parent:
            self._parent_gone("its connection closed")

    async def _send_heartbeats(self) -> None:
        """Sends a sign of life to each neighbour once a second and reports silent ones."""
        suspended = False
        while True:
            before = now()
            await asyncio.sleep(HEARTBEAT_S)
            # After a pause of this process, messages that came meanwhile are still to be read; the next round
            # will have read them.
            suspended = now() - before > 2 * HEARTBEAT_S and not suspended
            for link in [*self._children, *([self._parent] if self._parent else [])]:
                link.send_line(BEAT)
                if not suspended and now() - link.last_received > self._silence_s:
                    self._silent(link)

    def _silent(self, link: Link) -> None:
        # Without a route to the neighbour it is this machine that is cut off, and the neighbour may be well.
        reason = f"it has been silent for {self._silence_s:g} s"
        cut = not self._machine.has_route(link.writer)
        if link is self._parent:
            # It may hear this side well, and would take the end of the connection for that of this process.
            why = f"it hears nothing from rank {link.rank}"
            self.up(messages.Lost(self.rank, self.node, why, silent=True))
            self._parent_gone(reason, cut=cut)
        elif link in self._children:
            self._children.pop(link, None)
            link.close()  # it may hear this side well, and must end its rank at once
            if cut:
                self.up(messages.Cut(self.rank, self.node, f"rank {link.rank} on {link.node}"))
            else:
                self._child_lost(link, reason, silent=True)


def _single(message: Message) -> tuple[Message, ...]:
    return message.messages if isinstance(message, messages.Several) else (message,)


def _address(told: Sequence[Any]) -> Address:
    return str(told[0]), int(told[1])
