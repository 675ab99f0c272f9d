"""Lets Horovod's ranks meet over Gloo: rank 0 serves the addresses of all at MASTER_ADDR and MASTER_PORT.

Horovod's own horovodrun serves them in the launcher, for the ranks that it starts. Here any launcher can
start the ranks that tells them MASTER_ADDR, and each generation of them meets at a port of its own, on rank
0's machine, whichever that is then.
"""

import os
import socket
import threading
from collections.abc import Mapping

from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from trainer.comm.reach import wait_until_served
from trainer.errors import InputError
from trainer.supervise.variables import CROSS
from trainer.supervise.world import World, master_address
from trainer.sysinfo.addresses import listening_address


class _Handler(RendezvousHandler):  # type: ignore[misc]
    """Horovod's handler, which forgets nothing: a rank that has met all says so while others still look."""

    def do_DELETE(self) -> None:  # noqa: N802  (the name is that of http.server)
        self.send_status_code(200)


class _Server(RendezvousHTTPServer):  # type: ignore[misc]
    """Horovod's server of addresses, which all ranks ask at once."""

    request_queue_size = 1024
    daemon_threads = True

    def __init__(self, address: str, port: int) -> None:
        super().__init__((address, port), _Handler, False)


def meet(world: World, longest_s: float) -> None:
    """Sets Horovod's variables of this rank; rank 0 serves the addresses, the others wait for that.

    Raises InputError if MASTER_ADDR and MASTER_PORT are not set, or mean no IPv4 address, as Horovod needs,
    and TimeoutError if rank 0 does not serve them within `longest_s` seconds.
    """
    host, port = master_address(os.environ, world)
    address = _ipv4(host)
    if world.rank == 0:
        server = _Server(listening_address(address) or "", port)
        port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
    elif not wait_until_served(address, port, longest_s):
        raise TimeoutError(
            f"rank 0 does not serve the ranks' addresses at {host}, port {port}, after {longest_s:g} s"
        )
    os.environ.update(_variables(world, address, port, os.environ))


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


def _variables(world: World, address: str, port: int, env: Mapping[str, str]) -> dict[str, str]:
    """Returns Horovod's variables: this rank's place, and the address of the server.

    Raises InputError if the nodes may have different numbers of ranks and nobody says which ones.
    """
    place = {
        "HOROVOD_RANK": world.rank,
        "HOROVOD_SIZE": world.size,
        "HOROVOD_LOCAL_RANK": world.local_rank,
        "HOROVOD_LOCAL_SIZE": world.local_size,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
    }
    variables = {name: str(value) for name, value in place.items()}
    variables |= {"HOROVOD_HOSTNAME": env.get("HOROVOD_HOSTNAME") or world.node}
    variables |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": address}
    if set(CROSS) <= env.keys():
        return variables
    if world.size % world.local_size:
        raise InputError(
            f"{world.size} ranks, {world.local_size} of them on node {world.node}: Horovod over Gloo needs "
            f"as many on each node, or {' and '.join(CROSS)} for each rank, as `clipship run` sets them"
        )
    cross = world.rank // world.local_size, world.size // world.local_size
    return variables | dict(zip(CROSS, map(str, cross), strict=True))
