"""Lets Horovod's ranks meet over Gloo: rank 0 serves the addresses of all at MASTER_ADDR and MASTER_PORT.

Horovod's own horovodrun serves them in the launcher, for the ranks that it starts. Here any launcher can
start the ranks that tells them MASTER_ADDR, and each generation of them meets at a port of its own, on rank
0's machine, whichever that is then.
"""

import errno
import os
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping

from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from trainer.comm.reach import wait_until_served
from trainer.errors import InputError
from trainer.sysinfo.addresses import is_loopback, is_own, own_ipv4
from trainer.text.wording import many
from trainer.world.launchers import World, cross_of, master_address
from trainer.world.variables import CROSS, HOST

_LARGEST = 2**24
"""Bytes of the largest value that the server takes; a rank tells some 140 for each other rank."""


class _Handler(RendezvousHandler):  # type: ignore[misc]
    """Horovod's handler, which takes nothing large, shows no file, and forgets nothing.

    A rank that has met all says so while others still look for it.
    """

    def do_GET(self) -> None:  # noqa: N802  (these names are those of http.server)
        if self._names_a_key():
            super().do_GET()

    def do_PUT(self) -> None:  # noqa: N802
        length = self.headers.get("Content-Length", "")
        if not self._names_a_key():
            return
        if re.fullmatch(r"[0-9]{1,8}", length) and int(length) <= _LARGEST:
            super().do_PUT()
        else:
            self.send_status_code(413)

    def do_HEAD(self) -> None:  # noqa: N802
        self.send_status_code(405)

    def do_DELETE(self) -> None:  # noqa: N802
        self.send_status_code(200)

    def _names_a_key(self) -> bool:
        """Returns whether the path is /SCOPE/KEY, as of Horovod's ranks; refuses any other."""
        is_key = bool(self.path.count("/") == 2)
        if not is_key:
            self.send_status_code(400)
        return is_key


class _Server(RendezvousHTTPServer):  # type: ignore[misc]
    """Horovod's server of addresses, which all ranks ask at once."""

    request_queue_size = 1024
    daemon_threads = True

    def __init__(self, address: str, port: int) -> None:
        super().__init__((address, port), _Handler, False)

    def handle_error(self, request: object, client_address: object) -> None:
        """Drops a caller that leaves, or says what cannot be answered: it may be anybody on the network.

        A traceback of it in the log would look like the run's own.
        """

    def close(self) -> None:
        """Ends the server's thread, and frees the port."""
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Binds without http.server's question to a name server, which may take long to answer."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]


def meet(world: World, longest_s: float) -> Callable[[], None]:
    """Sets Horovod's variables of this rank; rank 0 serves the addresses, the others wait for that.

    Returns what closes the server once all ranks have met. Raises InputError if MASTER_ADDR and MASTER_PORT
    are not set, mean no IPv4 address, as Horovod needs, or are taken, and TimeoutError if rank 0 does not
    serve the addresses within `longest_s` seconds.
    """
    host, port = master_address(os.environ, world)
    address = _ipv4(host)
    own = is_own(address, socket.AF_INET)
    hidden = own and is_loopback(address) and not is_loopback(host)
    if hidden:  # Debian gives a machine's name the address 127.0.1.1 on the machine itself
        address = _address_for_others(host)
    close = _nothing
    if world.rank == 0:
        server = _serve(address if own and not hidden else "", port)
        port, close = server.server_port, server.close
    elif not wait_until_served(address, port, longest_s):
        raise TimeoutError(
            f"rank 0 does not serve the ranks' addresses at {host}, port {port}, after {longest_s:g} s"
        )
    os.environ.update(_variables(world, address, port, os.environ))
    return close


def _nothing() -> None:
    pass


def _serve(address: str, port: int) -> _Server:
    try:
        server = _Server(address, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise InputError(
            f"MASTER_PORT = {port}, where rank 0 serves the addresses of Horovod's ranks, is taken on this "
            "machine: give a free one"
        ) from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _ipv4(host: str) -> str:
    """Returns the host's IPv4 address. Raises InputError if it has none."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        raise InputError(
            f"Horovod over Gloo needs an IPv4 address, and {host}, where its ranks would meet, has none: use "
            "comm.launcher = mpirun, comm.backend = torch, or a name or address of IPv4"
        ) from None
    return str(found[0][4][0])


def _address_for_others(host: str) -> str:
    """Returns this machine's address for others, where its own name means only itself. Raises InputError."""
    try:
        return own_ipv4()
    except OSError:
        raise InputError(
            f"{host}, where Horovod's ranks would meet, is a loopback address on this machine, which has no "
            'route to others: give its address, on Slurm by slurm.rendezvous = "ipv4"'
        ) from None


def _variables(world: World, address: str, port: int, env: Mapping[str, str]) -> dict[str, str]:
    """Returns Horovod's variables: this rank's place, and the address of the server.

    Raises InputError if the nodes may have different numbers of ranks and nobody says which ones.
    """
    place = {
        "HOROVOD_RANK": world.rank,
        "HOROVOD_SIZE": world.size,
        "HOROVOD_LOCAL_RANK": world.local_rank,
        "HOROVOD_LOCAL_SIZE": world.local_size,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": env.get(HOST) or world.node,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
    }
    cross: tuple[str | int, ...] = tuple(env[name] for name in CROSS if name in env)
    if len(cross) < len(CROSS):
        if world.size % world.local_size:
            raise InputError(
                f"{many(world.size, 'rank')}, {world.local_size} of them on node {world.node}: Horovod over "
                f"Gloo needs as many on each node, or {' and '.join(CROSS)} for each rank, as `clipship run` "
                "sets them"
            )
        cross = cross_of(world)
    place |= dict(zip(("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"), cross, strict=True))
    return {name: str(value) for name, value in place.items()}
