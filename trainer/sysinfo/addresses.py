"""Addresses and network interfaces of this machine.

They let a listener bind where only those who need it can connect. Imports no torch.
"""

import errno
import ipaddress
import random
import re
import socket
from contextlib import suppress
from pathlib import Path

from trainer.errors import MachineError
from trainer.sysinfo.topology import file_text

PORTS = range(20_000, 32_768)
"""Ports below those that Linux gives to outgoing connections, which might take a port between the check
and its use."""
_ANSWERS_S = 5.0
_ELSEWHERE = "192.0.2.1"
"""Address that no machine has (RFC 5737)."""
_OF_CONTAINERS = re.compile(r"(docker|podman|cni|virbr|lxcbr|lxdbr)\d+|br-[0-9a-f]{12}")
_INTERFACES = Path("/sys/class/net")
_NONLOCAL_BIND = {
    socket.AF_INET: Path("/proc/sys/net/ipv4/ip_nonlocal_bind"),
    socket.AF_INET6: Path("/proc/sys/net/ipv6/ip_nonlocal_bind"),
}
"""Files with 1 where the kernel lets any address be bound, as load balancers want it."""
_ROUTES = Path("/proc/net/fib_trie")
"""File in which the kernel lists its routes of IPv4, those to its own addresses among them."""
_GIVEN: set[tuple[str, int]] = set()
"""Addresses and ports that this process has been given."""


def is_loopback(host: str) -> bool:
    """Returns whether the host always means the machine that reads it: a loopback address, or `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening_address(host: str, family: int = 0) -> str | None:
    """Returns the address of this machine that others reach as `host`, of a family of addresses if given.

    Returns None if it cannot be known; then the listener must bind to all addresses. Debian gives a machine
    the address 127.0.1.1 on the machine itself; other machines know it by another address.
    """
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
        for its_family, _, _, _, socket_address in found:
            address = str(socket_address[0])
            if (is_loopback(host) or not is_loopback(address)) and is_own(address, its_family):
                return address
    return None


def is_here(host: str) -> bool:
    """Returns whether the host, given by name or address, is this machine."""
    try:
        candidates = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(is_own(str(socket_address[0]), family) for family, _, _, _, socket_address in candidates)


def is_own(address: str, family: int) -> bool:
    """Returns whether the address belongs to this machine: whether it can be bound.

    Where the kernel lets any address be bound, the source of the route to it tells, or the kernel's table of
    routes: a second address of one subnet is no source. No packet is sent.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    binds_any = file_text(_NONLOCAL_BIND[socket.AddressFamily(family)]) == "1"
    return not binds_any or _is_source(address) or _is_local(address)


def _is_source(address: str) -> bool:
    try:
        source = address_towards(address)
    except OSError:
        return False
    return source == address or (is_loopback(source) and is_loopback(address))


def _is_local(address: str) -> bool:
    return f"-- {address} /32 host LOCAL" in " ".join(file_text(_ROUTES).split())


def address_towards(host: str, port: int = 9) -> str:
    """Returns this machine's address on the route to `host`. No packet is sent.

    Raises OSError if there is no route.
    """
    problem: OSError = OSError(errno.EHOSTUNREACH, f"no route to {host}")
    for family, kind, _, _, socket_address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(socket_address)
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = error
    raise problem


def own_ipv4() -> str:
    """Returns this machine's IPv4 address on the route to all other machines. Raises OSError without one."""
    return address_towards(_ELSEWHERE)


def check_loopback() -> None:
    """Raises MachineError if processes of this machine do not reach each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_ANSWERS_S).close()
    except OSError as problem:
        raise MachineError(
            f"this machine does not reach itself at 127.0.0.1 ({problem.strerror or problem}), where its "
            "ranks meet: its loopback interface is missing or down (`ip link set lo up`)"
        ) from None


def loopback_interface() -> str | None:
    """Returns the name of the loopback interface, `lo` on Linux and `lo0` on macOS; None if there is none."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def bridges_of_containers(interfaces: Path = _INTERFACES) -> list[str]:
    """Returns the names of the bridges to containers and virtual machines of this machine alone.

    Their addresses are often the same on each machine, so that who takes one for another machine's reaches
    itself. A bridge that nothing is plugged into is among them, whatever its name.
    """
    bridges = (path.parent for path in sorted(interfaces.glob("*/bridge")))
    return [path.name for path in bridges if _OF_CONTAINERS.fullmatch(path.name) or not _has_carrier(path)]


def _has_carrier(interface: Path) -> bool:
    return file_text(interface / "carrier") == "1"  # the kernel does not say it of an interface that is down


def free_port(address: str) -> int:
    """Returns a TCP port that is free on this machine's `address`, and another one at each call.

    Raises OSError if the address belongs to another machine.
    """
    for port in random.sample(PORTS, 100):
        if (address, port) in _GIVEN:  # who asked for it may not listen yet
            continue
        try:
            socket.create_server((address, port), family=address_family(address)).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            _GIVEN.add((address, port))
            return port
    raise OSError(errno.EADDRINUSE, f"100 ports of {address} below {PORTS.stop} are taken")


def address_family(address: str) -> socket.AddressFamily:
    """Returns the address family of a literal address: IPv6 if it has a colon, else IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
