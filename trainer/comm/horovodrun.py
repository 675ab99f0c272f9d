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
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from horovod.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from trainer.comm.localrun import collect_signals, wait_for_ranks
from trainer.supervise.world import FORGET_URL
from trainer.sysinfo.addresses import is_here

_REMOTE_START = """\
import json, os, sys
message = json.loads(sys.stdin.buffer.readline())
os.environ.update(message["variables"])
try:
    os.chdir(message["folder"])
except OSError:
    pass
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.execvp(message["command"][0], message["command"])
"""
"""Python program for another host: reads the environment from stdin, becomes the rank's command."""
_FORGET = "/clipship/forget"
"""Path of the rendezvous server at which a PUT makes it forget the ranks; Horovod's own scopes differ."""


class _Handler(RendezvousHandler):  # type: ignore[misc]
    """Horovod's handler, which also serves the next generation of ranks after the last one was killed.

    The ranks of a generation write their addresses under names that are the same in every generation.
    """

    def do_PUT(self) -> None:  # noqa: N802  (the name is that of http.server)
        if self.path != _FORGET:
            super().do_PUT()
            return
        self.server.forget()
        self.send_status_code(200)


class _Server(RendezvousHTTPServer):  # type: ignore[misc]
    """Horovod's rendezvous server for one set of slots."""

    def __init__(self, address: str, slots: Sequence[SlotInfo]) -> None:
        super().__init__((address, 0), _Handler, False)
        self._slots = slots
        self.forget()

    def forget(self) -> None:
        """Forgets all that ranks have written."""
        self.init(self._slots)


def main(arguments: Sequence[str]) -> int:
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
    options = parser.parse_args(arguments)
    hosts = [HostInfo(name, int(ranks)) for name, _, ranks in (host.rpartition(":") for host in options.host)]
    slots = get_host_assignments(hosts, sum(host.slots for host in hosts))
    server = _Server(options.address, slots)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    received = collect_signals()
    ssh = shlex.split(options.ssh)
    ranks = [
        _start(options.command, _variables(slot, options.address, server.server_port), slot, ssh)
        for slot in slots
    ]
    return wait_for_ranks(ranks, received, "horovodrun")


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
        FORGET_URL: f"http://{address}:{port}{_FORGET}",
    }


def _start(
    command: Sequence[str], variables: Mapping[str, str], slot: SlotInfo, ssh: Sequence[str]
) -> subprocess.Popen[bytes]:
    if is_here(slot.hostname):
        return subprocess.Popen(command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL)
    remote_command = shlex.join([sys.executable, "-P", "-c", _REMOTE_START])
    process = subprocess.Popen([*ssh, slot.hostname, remote_command], stdin=subprocess.PIPE)
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SSH_", "BASH_FUNC_", "OLDPWD"))
    }
    message = {"variables": {**own, **variables}, "folder": os.getcwd(), "command": command}
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.close()
    except BrokenPipeError:
        pass  # ssh has ended, and it prints why
    return process


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
