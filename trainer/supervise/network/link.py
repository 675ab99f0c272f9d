"""One connection to a supervisor: of a neighbour in the tree, or one that asks from outside to stop the run.

The request to stop does not depend on how the launcher treats signals, and needs no event loop. No torch.
"""

import asyncio
import json
import secrets
import socket
from contextlib import suppress
from typing import Any

from trainer.safe_io.plain import parse_json
from trainer.supervise.machine import Machine, now
from trainer.supervise.messages import Beat, Joined, Message, StopRequest, from_table, to_line, to_table
from trainer.supervise.network.tree_plan import Address
from trainer.world.rendezvous import Message as Table
from trainer.world.rendezvous import Rendezvous, is_signed, signed

OUTSIDER = -1
"""Rank of a caller that only makes a request: it is not part of the run and may leave at any time."""
BEAT = to_line(Beat())
PROBE_S, PROBE_AGAIN_S = 1.0, 0.1
"""Longest wait for the answer of a machine, and the wait before it is called again."""


class Link:
    """One connection to a neighbour in the tree."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self.last_received = now()
        self.rank, self.node = OUTSIDER, ""
        self.joined: Joined | None = None
        """Message in which the neighbour has introduced itself; None if it is no member of the run."""

    def send(self, message: Message) -> None:
        """Sends without waiting; a message that a dead neighbour does not take is lost."""
        self.send_line(to_line(message))

    def send_line(self, line: bytes) -> None:
        """Sends a message that is a line already."""
        if not self.writer.is_closing():  # else asyncio warns, and the reader has told of the end
            self.writer.write(line)

    async def receive(self) -> Message | None:
        """Returns the next message, signs of life left out; None if the neighbour has gone or sends none."""
        table = await self.receive_table()
        try:
            return None if table is None else from_table(table)
        except (ValueError, RecursionError):
            return None

    def send_table(self, table: Table) -> None:
        """Sends a table of a handshake, in which a caller has not yet proven that it belongs to the run."""
        self.send_line(json.dumps(table).encode() + b"\n")

    async def receive_table(self) -> Table | None:
        """Returns the next table; None if the neighbour has gone or sends what cannot be read."""
        try:
            while (line := await self._reader.readuntil(b"\n")) == BEAT:
                self.last_received = now()
            self.last_received, table = now(), parse_json(line)
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return None
        return table if isinstance(table, dict) else None

    async def flush(self) -> None:
        """Waits until what was sent is on its way."""
        with suppress(OSError):
            await self.writer.drain()

    def close(self) -> None:
        self.writer.close()

    async def closed(self) -> None:
        """Waits until the socket is really closed."""
        with suppress(OSError):
            await self.writer.wait_closed()

    def host(self) -> str:
        """Returns the neighbour's address as seen from here."""
        return str(self.writer.get_extra_info("peername")[0])

    def own_host(self) -> str:
        """Returns this side's address on the connection."""
        return str(self.writer.get_extra_info("sockname")[0])


async def is_refused(address: Address, machine: Machine) -> bool:
    """Returns whether the machine at this address answers that no process listens there any more.

    It calls twice, since a process that starts to listen just now refuses the first call, and waits at most
    PROBE_S for each answer. False if somebody listens, or if nobody answers.
    """
    for wait_s in (PROBE_AGAIN_S, 0.0):
        try:
            async with asyncio.timeout(PROBE_S):
                _, writer = await machine.connect(address)
        except ConnectionRefusedError:
            await asyncio.sleep(wait_s)
        except OSError:  # TimeoutError is one
            return False
        else:
            writer.close()
            return False
    return True


ANSWER_S = 2.0
REPEAT_S = 5.0
"""Signals of one sender within this many seconds of its first are one request: schedulers send several."""
_LINE = 2**16


def send_stop_request(rendezvous: Rendezvous, number: int, *, again: bool = False) -> bool:
    """Tells rank 0's supervisor that signal `number` came.

    Returns False if it does not answer, or another program does.

    `again` means that the user repeated the signal on purpose, so nothing is saved any more.
    """
    # TimeoutError is an OSError; another program may send anything.
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        return _ask(rendezvous, number, again)
    return False


def _ask(rendezvous: Rendezvous, number: int, again: bool) -> bool:
    with (
        socket.create_connection((rendezvous.host, rendezvous.port), ANSWER_S) as connection,
        connection.makefile("rwb") as file,
    ):
        nonces = str(parse_json(file.readline(_LINE))["nonce"]), secrets.token_hex(16)
        about = {"rank": OUTSIDER, "node": "", "port": 0, "nonce": nonces[1]}
        _send(file, signed(rendezvous.token, "newcomer", nonces, about))
        if not is_signed(rendezvous.token, "host", nonces, dict(parse_json(file.readline(_LINE)))):
            return False
        _send(file, to_table(StopRequest(number, 0, rendezvous.host, again, outside=True)))
        return True


def _send(file: Any, message: dict[str, object]) -> None:
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()
