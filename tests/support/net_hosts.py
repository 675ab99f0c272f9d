"""Two machines or three, and one that starts the ranks, all of them on this one.

Each has a network, a name and a folder for temporary files of its own. They share the other folders, as nodes
of a cluster do, but not what the one that starts the ranks keeps for itself. Needs root.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support import ssh_hosts

ADDRESSES = {"node-a": "10.231.0.2", "node-b": "10.231.0.3", "node-c": "10.231.0.4"}
TWO, THREE = tuple(ADDRESSES)[:2], tuple(ADDRESSES)
INTERFACE = "eth0"
_PORT = 2222
_NOBODY = ("lladdr", "02:00:00:00:00:01", "nud", "permanent")


def missing() -> str | None:
    """Names what this machine lacks for such hosts; None if it lacks nothing."""
    if os.geteuid() != 0:
        return "root"
    lacks = next((name for name in ("ip", "unshare") if shutil.which(name) is None), None)
    return lacks or ssh_hosts.missing_program()


@dataclass(frozen=True)
class Third:
    """The machine that runs no rank."""

    around: list[str]
    """Starts a command on it."""
    programs: Path
    """A folder to put first on PATH: its `ssh` knows the two others."""
    own: Path
    """Its folder for temporary files, which the others do not see."""

    def cut(self, one: str, other: str) -> None:
        """Cuts the network between two of the others as a switch may: neither notices it at its card."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", _name(here), "neigh", "replace", ADDRESSES[there], *_NOBODY, "dev", INTERFACE)

    def heal(self, one: str, other: str) -> None:
        """Mends what `cut` did."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", _name(here), "neigh", "del", ADDRESSES[there], "dev", INTERFACE)


@contextmanager
def three_machines(folder: Path, names: Sequence[str] = TWO) -> Iterator[Third]:
    """The machines of these names and the one that starts the ranks, up until the block ends."""
    ssh_hosts.make_keys(folder)
    (folder / "own").mkdir()
    addresses = {name: ADDRESSES[name] for name in names}
    lines = "".join(f"{address} {name}\n" for name, address in addresses.items())
    (folder / "names").write_text(f"127.0.0.1 localhost\n{lines}")  # gloo looks its own host's name up
    with ExitStack() as running:
        third = running.enter_context(_network(_name("third")))
        _ip("-n", third, "link", "add", INTERFACE, "type", "bridge")
        _ip("-n", third, "addr", "add", "10.231.0.1/24", "dev", INTERFACE)
        _ip("-n", third, "link", "set", INTERFACE, "up")
        for name, address in addresses.items():
            network = running.enter_context(_network(_name(name)))
            _plug(third, network, name, address)
            hidden = (
                f"mount -t tmpfs none {folder}/own && mount --bind {folder}/names /etc/hosts && "
                f'hostname {name} && exec "$@"'
            )
            around = ["ip", "netns", "exec", network, "unshare", "-m", "-u", "sh", "-c", hidden, "sh"]
            running.enter_context(ssh_hosts.sshd(folder, name, address, _PORT, around))
        programs = ssh_hosts.client(folder, {name: (address, _PORT) for name, address in addresses.items()})
        yield Third(["ip", "netns", "exec", third], programs, folder / "own")


def _name(machine: str) -> str:
    """Name of a machine's network on this machine."""
    return f"{machine}-{os.getpid()}"


@contextmanager
def _network(name: str) -> Iterator[str]:
    _ip("netns", "add", name)
    try:
        _ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        for pid in subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=True
        ).stdout.split():
            subprocess.run(["kill", "-KILL", pid], check=False)
        _ip("netns", "delete", name)


def _plug(third: str, network: str, name: str, address: str) -> None:
    """A cable from the machine to the switch, and what docker leaves on a machine."""
    _ip("-n", third, "link", "add", name, "type", "veth", "peer", "name", INTERFACE, "netns", network)
    _ip("-n", third, "link", "set", name, "master", INTERFACE, "up")
    _ip("-n", network, "addr", "add", f"{address}/24", "dev", INTERFACE)
    _ip("-n", network, "link", "set", INTERFACE, "up")
    # A bridge of docker with no container on it, which has the same address on each machine.
    _ip("-n", network, "link", "add", "docker0", "type", "bridge")
    _ip("-n", network, "addr", "add", "172.17.0.1/16", "dev", "docker0")
    _ip("-n", network, "link", "set", "docker0", "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
