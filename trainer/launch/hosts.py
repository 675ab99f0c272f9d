"""The hosts of `clipship run --hosts`, and the address at which torch's ranks meet on them.

Asks ssh, whose config names users, ports and keys. Imports no torch.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.errors import InputError, raise_problems
from trainer.launch.commands import answer_of
from trainer.sysinfo.addresses import PORTS, address_family, free_port, is_here, is_loopback

SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
"""Options of ssh that prevent a hang at the start: nobody sees the password prompt of a launcher's ssh,
and a dead host does not answer."""
KEEP_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""Options by which ssh ends a minute after its host is gone."""

ANSWER_S = 120.0
"""Longest that a host may take to answer ssh: one may take the connection and then stand still."""
_HOST = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*))(?::(?P<slots>[0-9]{1,5}))?"
)
_FREE_PORT = f"""\
import random, socket, sys
for port in random.sample(range({PORTS.start}, {PORTS.stop}), 100):
    try:
        socket.create_server((sys.argv[1], port), family=int(sys.argv[2])).close()
    except OSError:
        continue
    sys.exit(print(port))
sys.exit("100 ports below {PORTS.stop} are taken")
"""


@dataclass(frozen=True)
class Host:
    """A host as ssh knows it (name, alias or address), and its number of ranks."""

    name: str
    slots: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read `a:4,b:4`; a host without a number has one rank; IPv6 addresses are in brackets, `[fd00::2]:4`.

    Raises InputError that lists every host that cannot be read or is named twice.
    """
    hosts, problems = [], []
    for part in text.split(","):
        match = _HOST.fullmatch(part.strip())
        slots = int(match["slots"] or 1) if match else 0
        if match and slots:
            hosts.append(Host(match["ipv6"] or match["name"], slots))
        else:
            problems.append(
                f"--hosts: {part.strip()!r} is not a host: write name:ranks, such as a:4,b:4 or [fd00::2]:4 "
                "(users and ports belong in ~/.ssh/config)"
            )
    names = [host.name for host in hosts]
    problems += [
        f"--hosts: {name} is listed {names.count(name)} times: list it once, with all its ranks"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    raise_problems(problems)
    return tuple(hosts)


def hosts_text(hosts: Sequence[Host]) -> str:
    """Returns the hosts as `parse_hosts` reads them."""
    return ",".join(
        f"[{each.name}]:{each.slots}" if ":" in each.name else f"{each.name}:{each.slots}" for each in hosts
    )


def rendezvous_address(hosts: Sequence[Host]) -> tuple[str, int]:
    """Returns the address of the first host as the others reach it, and a TCP port that is free there now.

    Raises InputError if ssh cannot reach that host, or if its address is a loopback address for the others.
    """
    address = address_of(hosts[0])
    if is_loopback(address) and not all(is_loopback(address_of(host)) for host in hosts[1:]):
        raise InputError(
            f"--hosts: the first host, {hosts[0].name}, has the address {address}, at which each other host "
            "reaches only itself: give a name or address at which the others reach the first host"
        )
    return address, free_port(address) if is_here(address) else _free_port_there(hosts[0], address)


def address_of(host: Host) -> str:
    """Returns the address that ssh's config gives for an alias; the name itself if it is no alias."""
    answer = _ssh(host, "-G", host.name)
    return next(
        (line.split()[1] for line in answer.stdout.splitlines() if line.startswith("hostname ")), host.name
    )


def _free_port_there(host: Host, address: str) -> int:
    question = shlex.join([sys.executable, "-c", _FREE_PORT, address, f"{address_family(address):d}"])
    answer = _ssh(host, *SSH_OPTIONS, *KEEP_ALIVE, host.name, question)
    if answer.returncode or not answer.stdout.strip().isdigit():
        raise InputError(
            f"--hosts: ssh {host.name} could not find a free port with {sys.executable}: "
            f"{answer.stderr.strip() or answer.stdout.strip()}\neach host needs this environment at the "
            "same path, and ssh must reach it without a password"
        )
    return int(answer.stdout)


def _ssh(host: Host, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return answer_of("ssh", *arguments, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        raise InputError(
            f"--hosts: ssh {host.name} has not ended after {ANSWER_S:g} s: the host stands still, or waits "
            f"for a file system; `ssh {host.name} true` must work at once"
        ) from None
    except FileNotFoundError:
        raise InputError("--hosts needs ssh, which is not on PATH: install openssh-client") from None
