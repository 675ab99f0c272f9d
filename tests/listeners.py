"""TCP sockets that listen in a tree of processes, read from /proc.

A stranger is here, too: it plants a pickle wherever a torch store answers.
"""

import base64
import ipaddress
import pickle
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.runs import descendants
from trainer.sysinfo.addresses import address_towards

_ASKS = "asks "
"""Word of a process that has imported torch."""
_LISTEN = "0A"  # TCP_LISTEN of the kernel's net/tcp_states.h
_RENDEZVOUS = "torch.rendezvous."
_IMPORT_S = 60.0
_ANSWER_S = 5.0
"""Limit for a store's answer.

A port that is no store may never answer, and torch's client then waits without a limit and ignores signals.
Therefore each port gets a process of its own.
"""


@dataclass(frozen=True)
class Listener:
    """A listening socket: the command of its process, its address and port."""

    command: str
    address: str
    port: int

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the socket."""
        return ipaddress.ip_address(self.address).is_loopback


def listeners(root: int) -> list[Listener]:
    """Returns the listening sockets of the process and of all its descendants."""
    places = {inode: place for name in ("tcp", "tcp6") for inode, place in _places(Path("/proc/net", name))}
    return [
        Listener(_command(pid), *places[inode])
        for pid in (root, *descendants(root))
        for inode in _inodes(pid)
        if inode in places
    ]


def outer_address() -> str:
    """An address of this machine that other machines use; the test is skipped where it has none."""
    try:
        return address_towards("192.0.2.1")
    except OSError:
        pytest.skip("this machine has no network")


def plant(found: list[Listener], outer: str, mark: Path) -> int:
    """Plays a stranger: puts a pickle into every port that answers as a torch store.

    The pickle stands where torch's rendezvous keeps its state and makes the file `mark`. Returns the number
    of values planted.
    """
    strangers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.listeners", address, str(listener.port), str(mark)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for listener in found
        for address in ({outer, "127.0.0.1"} if not listener.is_local else {"127.0.0.1"})
    ]
    limit = time.monotonic() + _IMPORT_S
    for stranger in strangers:
        assert stranger.stdout is not None
        select.select([stranger.stdout], [], [], max(0.0, limit - time.monotonic()))
    limit = time.monotonic() + _ANSWER_S
    return sum(_planted(stranger, limit - time.monotonic()) for stranger in strangers)


def _planted(stranger: "subprocess.Popen[str]", left_s: float) -> int:
    """Returns what the process has planted; 0 if it still waits for an answer, and then ends it."""
    try:
        said = stranger.communicate(timeout=max(0.0, left_s))[0]
    except subprocess.TimeoutExpired:
        stranger.kill()
        said = stranger.communicate()[0]
    return int(said.removeprefix(_ASKS) or 0)


class _Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._mark,)


def _plant(address: str, port: int, mark: Path) -> int:
    from torch.distributed import TCPStore

    print(_ASKS, end="", flush=True)
    try:
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
        keys = [key for key in store.list_keys() if _RENDEZVOUS in key]
        for key in keys:
            store.set(key, base64.b64encode(pickle.dumps(_Touch(mark))).decode())
    except Exception:  # no store, or none any more
        return 0
    return len(keys)


def _places(table: Path) -> list[tuple[str, tuple[str, int]]]:
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    return [(row[9], _place(row[1])) for row in rows if row[3] == _LISTEN]


def _place(text: str) -> tuple[str, int]:
    """The kernel writes addresses as words in the machine's byte order."""
    address, _, port = text.partition(":")
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found), int(port, 16)


def _inodes(pid: int) -> list[str]:
    found = []
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            name = str(entry.readlink())
            if name.startswith("socket:["):
                found.append(name.removeprefix("socket:[").removesuffix("]"))
    except OSError:  # it has just ended
        pass
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    print(_plant(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
