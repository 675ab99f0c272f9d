"""A simulated network: streams between processes of nodes, with delays, cuts and machines that are gone."""

import asyncio
import contextvars
import random
from typing import Any

from tests.simulated.loop import Process, SimulatedLoop
from trainer.supervise.machine import Accept
from trainer.supervise.network.tree_plan import Address

_LIMIT = 2**20
RETRY_S = 0.5
_FIRST_PORT = 20_000
_NOBODY = contextvars.Context()
"""Context of no process: a packet comes though its sender is frozen or dead."""


class Network:
    """Connections of all processes; nothing passes from one node to another whose pair is in `cut`."""

    def __init__(self, loop: SimulatedLoop, rng: random.Random) -> None:
        self.loop, self._rng = loop, rng
        self.cut: set[tuple[str, str]] = set()
        self.slow_s: dict[str, float] = {}
        """Seconds that a packet of a node takes longer."""
        self.gone: set[str] = set()
        """Nodes without power: nobody answers there, not even the kernel."""
        self.messages = self.bytes = 0
        """All that was sent; what is written at once is one message."""
        self._listeners: dict[Address, tuple[Process, Accept]] = {}
        self._ports = _FIRST_PORT

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self.cut or source in self.gone or target in self.gone

    def is_silent(self, node: str) -> bool:
        """Returns whether others may not hear of a connection that ends there."""
        return node in self.gone or any(node in pair for pair in self.cut)

    def delay_s(self, source: str, target: str) -> float:
        """Returns how long the next packet takes."""
        slow_s = self.slow_s.get(source, 0.0) + self.slow_s.get(target, 0.0)
        return self._rng.uniform(0.0001, 0.003) + slow_s

    def listen(self, process: Process, host: str, port: int, accept: Accept) -> "Server":
        if not port:
            self._ports += 1
            port = self._ports
        if (host, port) in self._listeners:
            raise OSError(98, "Address already in use")
        self._listeners[host, port] = process, accept
        process.at_end.append(lambda: self._listeners.pop((host, port), None))
        return Server(self._listeners, (host, port))

    async def connect(
        self, process: Process, source: str, address: Address
    ) -> tuple[asyncio.StreamReader, "Writer"]:
        """Calls an address from a node. A call into a cut is answered once that has healed."""
        target = address[0]
        await asyncio.sleep(2 * self.delay_s(source, target))
        while self.is_cut(source, target) or self.is_cut(target, source):
            await asyncio.sleep(RETRY_S)
        if address not in self._listeners:
            raise ConnectionRefusedError(111, "Connection refused")
        its, accept = self._listeners[address]
        ours = Writer(self, process, (source, self._rng.randrange(30_000, 60_000)))
        theirs = Writer(self, its, address)
        ours.peer, theirs.peer = theirs, ours
        its.run(lambda: self.loop.create_task(accept(theirs.reader, theirs)))  # type: ignore[arg-type]
        return ours.reader, ours


class Server:
    """What a process listens with; it has what supervisors use of asyncio.Server."""

    def __init__(self, listeners: dict[Address, Any], address: Address) -> None:
        self._listeners, self._address = listeners, address
        self.sockets = (self,)

    def getsockname(self) -> Address:
        return self._address

    def close(self) -> None:
        self._listeners.pop(self._address, None)


class Writer:
    """One end of a connection; it has what supervisors use of StreamWriter.

    Packets keep their order. What meets a cut is sent again until it has healed, as TCP does.
    """

    def __init__(self, network: Network, process: Process, own: Address) -> None:
        self._network, self.own = network, own
        self.reader = asyncio.StreamReader(_LIMIT, loop=network.loop)
        self.peer: Writer
        self._closed = False
        self._waiting: list[bytes] = []
        """What is on its way, in order; b"" is the end."""
        self._sending = False
        process.at_end.append(self.close)

    def get_extra_info(self, name: str) -> Any:
        return {"peername": self.peer.own, "sockname": self.own}[name]

    def is_closing(self) -> bool:
        return self._closed

    def write(self, data: bytes) -> None:
        if not self._closed:
            self._network.messages += 1
            self._network.bytes += len(data)
            self._put(data)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.reader.feed_eof()
            self._put(b"")

    async def wait_closed(self) -> None:
        await asyncio.sleep(0)

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        if not self._sending:
            self._sending = True
            delay_s = self._network.delay_s(self.own[0], self.peer.own[0])
            self._network.loop.call_later(delay_s, self._deliver, context=_NOBODY)

    def _deliver(self) -> None:
        network, loop = self._network, self._network.loop
        if network.is_cut(self.own[0], self.peer.own[0]):
            loop.call_later(RETRY_S, self._deliver, context=_NOBODY)
            return
        self._sending = False
        waiting, self._waiting = self._waiting, []
        reader = self.peer.reader
        if reader.at_eof() or self.peer._closed:
            if b"" not in waiting and not self._closed:  # the other side answers with a reset
                self.reader.feed_eof()
            return
        for data in waiting:
            if data:
                reader.feed_data(data)
            else:
                reader.feed_eof()
