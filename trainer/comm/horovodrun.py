"""Starts Horovod's ranks over Gloo as horovodrun does, with a rendezvous server.

Processes are local or start over ssh. Horovod's own horovodrun puts the whole environment on a command line,
which everybody on the machine can read, and its server listens on every interface. Here local ranks inherit
the environment, remote ones get it through standard input, and the server listens on one address. It is a
process of its own, since the launcher half never imports Horovod.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from horovod.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from trainer.sysinfo.addresses import is_here

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL for the ranks that are left when one has failed."""
_POLL_S = 0.1
_THERE = """\
import json, os, sys
told = json.loads(sys.stdin.buffer.readline())
os.environ.update(told["variables"])
try:
    os.chdir(told["folder"])
except OSError:
    pass
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.execvp(told["command"][0], told["command"])
"""
"""Python program for another host: reads the environment from stdin, becomes the rank's command."""


def main(words: Sequence[str]) -> int:
    """Starts the ranks and waits for them; returns the exit code of the first that failed.

    The code is 128 + N if signal N ended that rank or this process.
    """
    parser = argparse.ArgumentParser(prog="trainer.comm.horovodrun")
    parser.add_argument(
        "--address", required=True, help="Address of this machine at which the rendezvous server listens."
    )
    parser.add_argument(
        "--host",
        action="append",
        required=True,
        metavar="NAME:RANKS",
        help="Host and its number of ranks; give one --host per host, in the order of ranks.",
    )
    parser.add_argument(
        "--ssh", default="ssh", help="Command that reaches other hosts, quoted as for a shell."
    )
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(words)
    hosts = [HostInfo(name, int(ranks)) for name, _, ranks in (host.rpartition(":") for host in given.host)]
    slots = get_host_assignments(hosts, sum(host.slots for host in hosts))
    server = RendezvousHTTPServer((given.address, 0), RendezvousHandler, False)
    server.init(slots)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    received: list[int] = []

    def collect(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, collect)
    ssh = shlex.split(given.ssh)
    ranks = [
        _start(given.command, _variables(slot, given.address, server.server_port), slot, ssh)
        for slot in slots
    ]
    return _wait(ranks, received)


def _variables(slot: SlotInfo, address: str, port: int) -> dict[str, str]:
    """Returns Horovod's variables: this rank's place in the world and the rendezvous server's address."""
    return {
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def _start(
    command: Sequence[str], variables: Mapping[str, str], slot: SlotInfo, ssh: Sequence[str]
) -> subprocess.Popen[bytes]:
    if is_here(slot.hostname):
        return subprocess.Popen(command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL)
    there = shlex.join([sys.executable, "-P", "-c", _THERE])
    process = subprocess.Popen([*ssh, slot.hostname, there], stdin=subprocess.PIPE)
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SSH_", "BASH_FUNC_", "OLDPWD"))
    }
    told = {"variables": {**own, **variables}, "folder": os.getcwd(), "command": command}
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(told).encode() + b"\n")
        process.stdin.close()
    except BrokenPipeError:
        pass  # ssh has ended, and it prints why
    return process


def _wait(ranks: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> int:
    """Waits until all ranks have ended; the first failure, or a signal, ends the others.

    Returns the exit code.
    """
    code, deadline = 0, float("inf")
    while None in [rank.poll() for rank in ranks]:
        if deadline == float("inf"):
            code = _first_failure(ranks) or (128 + received[0] if received else 0)
            if code:
                deadline = time.monotonic() + GRACE_S
                _signal(ranks, signal.SIGTERM)
        elif time.monotonic() > deadline:
            _signal(ranks, signal.SIGKILL)
        time.sleep(_POLL_S)
    return code or _first_failure(ranks)


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Returns the exit code of the lowest failed rank and names it on stderr; 0 if none failed."""
    for number, rank in enumerate(ranks):
        if rank.returncode:
            how = (
                f"with exit code {rank.returncode}"
                if rank.returncode > 0
                else f"by signal {signal.Signals(-rank.returncode).name}"
            )
            print(f"horovodrun: rank {number} ended {how}, so the other ranks were stopped", file=sys.stderr)
            return rank.returncode if rank.returncode > 0 else 128 - rank.returncode
    return 0


def _signal(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
