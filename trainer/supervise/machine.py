"""Machine of one supervisor: its clocks, network, terminal and threads. A simulation hands in one of its own.

No torch.
"""

import asyncio
import errno
import socket
import time
from collections.abc import Awaitable, Callable, Mapping

from trainer.run.file_work import THREADS, FileWork
from trainer.supervise.network.tree_plan import Address
from trainer.supervise.rank.generation import fresh_variables
from trainer.supervise.rank.rank_report import ras_status
from trainer.sysinfo.addresses import is_loopback, listening_address
from trainer.text.terminal import tell
from trainer.world.state_folder import newest_kept

Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
_LINE = 2**20
"""Longest line in bytes: a roster of ten thousand members has some hundred kB."""
_BACKLOG = 4096
"""Calls that wait for an answer: the first supervisors of all nodes call at once when the root is lost."""


def now() -> float:
    """Returns seconds on the running event loop's clock: outside of a simulation that of `time.monotonic`."""
    return asyncio.get_running_loop().time()


class Machine:
    """All that a supervisor asks of its machine, apart from its rank and the event loop."""

    files: FileWork = THREADS
    """Does work with files beside the event loop."""

    def wall_time(self) -> float:
        """Returns seconds since the epoch, as this machine believes."""
        return time.time()

    def say(self, line: str) -> None:
        """Shows a line to people."""
        tell(line)

    async def connect(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Calls an address. Raises OSError."""
        return await asyncio.open_connection(*address, limit=_LINE)

    async def listening_address(self, host: str) -> str | None:
        """Returns the address of this machine that others reach by that name; None: all of its own."""
        return host if is_loopback(host) else await asyncio.to_thread(listening_address, host)

    async def listen(self, accept: Accept, host: str | None, port: int) -> asyncio.Server:
        """Listens at one address of this machine, or at all of them if it is None. Raises OSError."""
        return await asyncio.start_server(accept, host, port, limit=_LINE, backlog=_BACKLOG)

    def has_route(self, writer: asyncio.StreamWriter) -> bool:
        """Returns whether this machine's network has a route to the other side. It sends no packet."""
        try:
            with socket.socket(writer.get_extra_info("socket").family, socket.SOCK_DGRAM) as probe:
                probe.connect(writer.get_extra_info("peername"))
        except OSError as error:
            return error.errno not in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
        return True

    async def fresh_variables(self, env: Mapping[str, str], address: str) -> dict[str, str]:
        """Returns the variables by which the ranks of the next generation meet here. Raises OSError."""
        try:
            return await asyncio.to_thread(fresh_variables, env, address)
        except RuntimeError as error:  # there may be no more threads
            raise OSError(str(error)) from None

    def newest_kept(self, env: Mapping[str, str]) -> int:
        """Returns the newest step that this node has kept in memory; 0 if there is none."""
        return newest_kept(env)

    async def ras_status(self) -> str:
        """Returns NCCL's own view of all communicators of the run; "" if nothing answers."""
        return await ras_status()
