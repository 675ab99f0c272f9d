"""Starts Horovod's ranks over Gloo as horovodrun does, with a rendezvous server.

Processes are local or start over ssh. Horovod's own horovodrun puts the whole environment on a command line,
which everybody on the machine can read, and its server listens on every interface. Here local ranks inherit
the environment, remote ones get it through standard input, and the server listens on one address. It is a
process of its own, since the launcher half never imports Horovod.
"""

import argparse
import shlex
import sys
import threading
from collections.abc import Mapping, Sequence

from horovod.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from trainer.comm.localrun import add_common, add_hosts, read_hosts
from trainer.comm.ssh_start import start_on
from trainer.comm.started_ranks import StartedRank, collect_signals, run_ranks
from trainer.supervise.variables import FORGET_URL

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
    """Starts the ranks and waits for them; returns the exit code.

    It is that of the first rank that failed, or with `--keep-going` that on which the surviving supervisors
    agreed; 128 + N if signal N ended that rank or this process.
    """
    parser = argparse.ArgumentParser(prog="trainer.comm.horovodrun")
    parser.add_argument(
        "--address", required=True, help="Address of this machine at which the rendezvous server listens."
    )
    add_hosts(parser, required=True)
    add_common(parser)
    options = parser.parse_args(arguments)
    hosts = [HostInfo(name, ranks) for name, ranks in read_hosts(options.host)]
    slots = get_host_assignments(hosts, sum(host.slots for host in hosts))
    server = _Server(options.address, slots)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    received = collect_signals()
    ssh = shlex.split(options.ssh)

    def start(rank: int, more: Mapping[str, str]) -> StartedRank:
        slot = slots[rank]
        variables = {**_variables(slot, options.address, server.server_port), **more}
        return start_on(slot.hostname, options.command, variables, ssh, rank)

    return run_ranks(start, len(slots), received, "horovodrun", keep_going=options.keep_going)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
