"""How supervisors talk: a tree of TCP connections beside the ranks' own. Messages go up to rank 0's supervisor and down to all.

Everyone calls the root first, which keeps the first of each node, up to a number, and sends the others on: to the first of their own
node, or to another node's first that has room. So a heartbeat goes to a neighbour and no process has more than some tens of them.
A line of JSON is a message. Newcomers prove that they know the run's token (HMAC of a fresh number); it never travels. No torch.
"""

import asyncio
import errno
import hmac
import ipaddress
import json
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

MEETING = "CLIPSHIP_SUPERVISORS"
"""`host:port` of rank 0's supervisor."""
TOKEN = "CLIPSHIP_TOKEN"
FANOUT = 32
"""Nodes below a supervisor, beside the ranks of its own node."""
BEAT_S = 1.0
HANDSHAKE_S = 5.0
OUTSIDER = -1
"""The rank of who only has a request: it is no part of the run, and may leave at any time."""
_LINE = 2**20
_BACKLOG = 1024

Message = dict[str, Any]
Address = tuple[str, int]


@dataclass(frozen=True)
class Meeting:
    """Where rank 0's supervisor listens, and what proves that one belongs to the run."""

    host: str
    port: int
    token: str

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "Meeting | None":
        """None where the launcher names no such place: each supervisor is then on its own."""
        host, _, port = env.get(MEETING, "").rpartition(":")
        return cls(host.strip("[]"), int(port), env.get(TOKEN, "")) if host and port.isdigit() else None

    @property
    def start(self) -> str:
        """Names this start of the run, which the files that it leaves carry: an older start's are not mistaken for its own."""
        return proof(self.token, "start")[:16]

    def variables(self) -> dict[str, str]:
        """What `from_env` reads."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return {MEETING: f"{host}:{self.port}", TOKEN: self.token}


def proof(token: str, nonce: str) -> str:
    """What somebody who knows the token answers to the number."""
    return hmac.new(token.encode(), nonce.encode(), "sha256").hexdigest()


class Places:
    """The root's plan of the tree: who is whose child. Breadth first, so that it stays flat."""

    def __init__(self, root_node: str, fanout: int = FANOUT) -> None:
        self._fanout = fanout
        self._firsts: dict[str, Address | None] = {root_node: None}
        self._children: dict[Address | None, int] = {None: 0}
        self._with_room: deque[Address | None] = deque([None])

    def parent(self, node: str, address: Address) -> Address | None:
        """Whose child a newcomer at `address` becomes; None: the root's own."""
        if node in self._firsts:
            first = self._firsts[node]
            return None if first == address else first  # the first of a node asks again where its parent did not answer
        parent = self._with_room[0]
        self._children[parent] += 1
        if self._children[parent] == self._fanout:
            self._with_room.popleft()
        self._firsts[node] = address
        self._children[address] = 0
        self._with_room.append(address)
        return parent


class Link:
    """One connection to a neighbour in the tree."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.heard = time.monotonic()
        self.rank, self.node = OUTSIDER, ""

    def send(self, message: Message) -> None:
        """Never waits; what a dead neighbour does not take is lost."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> Message | None:
        """The next message, None when the neighbour has gone or says what nobody understands."""
        try:
            line = await self._reader.readuntil(b"\n")
            message = json.loads(line)
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return None
        self.heard = time.monotonic()
        return message if isinstance(message, dict) else None

    async def flush(self) -> None:
        """Until what was sent is on its way."""
        with suppress(OSError):
            await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    async def closed(self) -> None:
        """Until the socket is really closed."""
        with suppress(OSError):
            await self._writer.wait_closed()

    def host(self) -> str:
        """The neighbour's address as it is seen from here."""
        return str(self._writer.get_extra_info("peername")[0])

    def leads_out(self) -> bool:
        """False where this machine's network has no way to the neighbour. No packet is sent."""
        try:
            with socket.socket(self.family(), socket.SOCK_DGRAM) as probe:
                probe.connect(self._writer.get_extra_info("peername"))
        except OSError as error:
            return error.errno not in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
        return True

    def family(self) -> int:
        """IPv4 or IPv6, as the socket module numbers them."""
        return int(self._writer.get_extra_info("socket").family)


class Tree:
    """One supervisor's place in it. Callbacks run in the event loop and do not wait."""

    def __init__(self, meeting: Meeting, rank: int, node: str, silence_s: float, fanout: int = FANOUT) -> None:
        self.meeting, self.rank, self.node = meeting, rank, node
        self.at_root: Callable[[Message], None] = lambda message: None
        """At the root: what somebody below said."""
        self.from_above: Callable[[Message], None] = lambda message: None
        """What the root says, and `orphaned` where the supervisor above is gone: `relayed` where it is one further up, `cut` where it is
        this machine's network that is."""
        self.ending = False
        """Links that close from now on are no news."""
        self._silence_s = silence_s
        self._places = Places(node, fanout)
        self._parent: Link | None = None
        self._unsent: list[Message] = []
        self._children: set[Link] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(self, timeout_s: float) -> None:
        """Listen, and find a parent. Raises OSError where the port is taken, TimeoutError where nobody answers in time."""
        root = self.rank == 0
        host = self.meeting.host if _is_loopback(self.meeting.host) else None
        port = self.meeting.port if root else 0
        self._server = await asyncio.start_server(self._newcomer, host, port, limit=_LINE, backlog=_BACKLOG)
        if not root:
            self._parent = await self._find_parent(time.monotonic() + timeout_s)
            self._spawn(self._hear_parent(self._parent))
            for message in self._unsent:
                self._parent.send(message)
        self._spawn(self._beat())

    def up(self, message: Message) -> None:
        """To the root; at the root itself, to itself."""
        if self.rank == 0:
            self.at_root(message)
        elif self._parent is not None:
            self._parent.send(message)
        else:
            self._unsent.append(message)

    def down(self, message: Message) -> None:
        """To everybody below, and to this supervisor."""
        for child in self._children:
            child.send(message)
        self.from_above(message)

    async def leave(self) -> None:
        """Send what is still to be sent, and close."""
        self.ending = True
        links = [*self._children, *([self._parent] if self._parent else [])]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(link.flush() for link in links)), BEAT_S)
        for link in links:
            link.close()
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
        await asyncio.wait(
            [asyncio.ensure_future(link.closed()) for link in links] or [asyncio.ensure_future(asyncio.sleep(0))], timeout=BEAT_S
        )

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _find_parent(self, deadline: float) -> Link:
        """The root says who it is; a parent that does not answer is asked for anew, until the deadline."""
        while True:
            link, parent = await self._call((self.meeting.host, self.meeting.port))
            if link is not None and parent is not None:
                link.close()
                link, parent = await self._call(parent)
            if link is not None and parent is None:
                return link
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0's supervisor does not answer at {self.meeting.host}, port {self.meeting.port}")
            await asyncio.sleep(0.2)

    async def _call(self, address: Address) -> tuple[Link | None, Address | None]:
        """A link that was welcomed, and where to go on to."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                link = Link(*await asyncio.open_connection(*address, limit=_LINE))
                answer = await self._introduce(link)
        except OSError:  # TimeoutError is one
            return None, None
        if answer is None:
            link.close()
            return None, None
        link.rank, link.node = int(answer["rank"]), str(answer["node"])
        return link, (str(answer["parent"][0]), int(answer["parent"][1])) if answer["parent"] else None

    async def _introduce(self, link: Link) -> Message | None:
        challenge = await link.receive()
        if challenge is None or self._server is None:
            return None
        ports = {int(sock.family): sock.getsockname()[1] for sock in self._server.sockets}
        about = {"rank": self.rank, "node": self.node, "port": ports.get(link.family(), 0)}
        link.send({**about, "proof": proof(self.meeting.token, str(challenge.get("nonce")))})
        return await link.receive()

    async def _newcomer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                welcome = await self._welcome(link)
        except TimeoutError:
            welcome = False
        if welcome:
            with suppress(asyncio.CancelledError):  # of a supervisor that leaves; asyncio would print it
                await self._hear_child(link)
        link.close()

    async def _welcome(self, link: Link) -> bool:
        """Whether the newcomer is this supervisor's child, or has a request. It has been told where to go if not."""
        nonce = secrets.token_hex(16)
        link.send({"nonce": nonce})
        hello = await link.receive()
        if hello is None or not hmac.compare_digest(str(hello.get("proof")), proof(self.meeting.token, nonce)):
            return False
        link.rank, link.node = int(hello["rank"]), str(hello["node"])
        parent = None
        if self.rank == 0 and link.rank != OUTSIDER:
            parent = self._places.parent(link.node, (link.host(), int(hello["port"])))
        link.send({"parent": parent, "rank": self.rank, "node": self.node})
        await link.flush()
        return parent is None

    async def _hear_child(self, link: Link) -> None:
        member = link.rank != OUTSIDER
        if member:
            self._children.add(link)
            self.up({"kind": "joined", "rank": link.rank, "node": link.node})
        while (message := await link.receive()) is not None:
            if "kind" in message:
                self.up(message)
        if member:
            self._children.discard(link)
            self._child_lost(link, "its connection closed")

    def _parent_gone(self, reason: str, cut: bool = False) -> None:
        assert self._parent is not None
        lost = {"kind": "orphaned", "rank": self._parent.rank, "node": self._parent.node, "reason": reason, "cut": cut}
        for child in self._children:  # else each level would find out for itself, and take its time
            child.send({**lost, "relayed": True})
        self.from_above({**lost, "relayed": False})

    def _child_lost(self, link: Link, reason: str) -> None:
        if not self.ending:
            self.up({"kind": "lost", "rank": link.rank, "node": link.node, "reason": reason})

    async def _hear_parent(self, link: Link) -> None:
        while (message := await link.receive()) is not None:
            if "kind" in message:
                self.down(message)
        if not self.ending:
            self._parent_gone("its connection closed")

    async def _beat(self) -> None:
        """Once a second a sign of life to each neighbour, and a look at who gave none for too long."""
        held_up = False
        while True:
            before = time.monotonic()
            await asyncio.sleep(BEAT_S)
            # Where this process was stopped for a while, what the others said meanwhile is still to be read; it is read by the next time.
            held_up = time.monotonic() - before > 2 * BEAT_S and not held_up
            for link in [*self._children, *([self._parent] if self._parent else [])]:
                link.send({})
                if not held_up and time.monotonic() - link.heard > self._silence_s:
                    self._silent(link)

    def _silent(self, link: Link) -> None:
        reason, cut = f"it has been silent for {self._silence_s:g} s", not link.leads_out()
        if link is self._parent:
            self._parent_gone(reason, cut)
        elif link in self._children:
            self._children.discard(link)
            if cut:
                self.up({"kind": "cut", "rank": self.rank, "node": self.node, "other": f"rank {link.rank} on {link.node}"})
            else:
                self._child_lost(link, reason)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
