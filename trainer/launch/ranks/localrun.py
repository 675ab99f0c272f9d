"""Starts ranks as processes of this machine, or over ssh on several hosts, and waits for them.

`python -m trainer.launch.ranks.localrun --host NAME:RANKS -- COMMAND ...` is a process of its own, so that
its end ends the ranks too. It listens nowhere: ranks meet at MASTER_ADDR and MASTER_PORT, which rank 0
serves. The environment reaches another host through standard input: a command line can be read by everybody
on the machine. It imports no torch, unlike torchrun, whose import alone takes seconds.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from signal import SIGTERM

from trainer.launch.ranks.started_ranks import StartedRank, collect_signals, place_variables, run_ranks
from trainer.sysinfo.addresses import is_here
from trainer.sysinfo.parent import signal_with_parent
from trainer.sysinfo.signals import reset_inherited_signals
from trainer.world.rendezvous import TOKEN
from trainer.world.variables import CROSS, HOST, RESPAWNED

_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
"""Prefixes of torchrun's variables: around this process they describe another world."""


@dataclass(frozen=True)
class Place:
    """Place of a rank: its host, "" for this machine, and its number among those of the host.

    `cross` is the number of the host among those that have this local rank, and their number.
    """

    host: str
    local_rank: int
    local_size: int
    cross: tuple[int, int]


def main(arguments: Sequence[str]) -> int:
    """Starts the ranks and waits for them; returns the exit code.

    It is that of the first rank that failed, or with `--keep-going` that on which the surviving supervisors
    agreed; 128 + N if signal N ended that rank or this process.
    """
    parser = argparse.ArgumentParser(prog="trainer.launch.ranks.localrun")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--ranks", type=int, help="Number of ranks, all on this machine.")
    where.add_argument(
        "--host",
        action="append",
        metavar="NAME:RANKS",
        help="Host and its number of ranks; give one --host per host, in the order of ranks.",
    )
    parser.add_argument(
        "--ssh", default="ssh", help="Command that reaches other hosts, quoted as for a shell."
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="The others go on if a signal ends one rank's supervisor, or ssh loses its host; it is then "
        "started again.",
    )
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    reset_inherited_signals()
    received = collect_signals()
    for name in [name for name in os.environ if name.startswith(_TORCHRUN_PREFIXES)]:
        del os.environ[name]
    places = places_of(_read_hosts(options.host)) if options.host else places_of([("", options.ranks)])
    ssh = shlex.split(options.ssh)

    def start(rank: int, more: Mapping[str, str]) -> StartedRank:
        place = places[rank]
        variables = {**_variables(rank, len(places), place), **more}
        if not place.host:
            return start_here(options.command, variables, stdin=None)
        return start_on(place.host, options.command, variables, ssh, rank)

    return run_ranks(start, len(places), received, "clipship", keep_going=options.keep_going)


def _read_hosts(hosts: Sequence[str]) -> list[tuple[str, int]]:
    """Returns names and numbers of ranks from values of `--host`."""
    return [(name, int(ranks)) for name, _, ranks in (host.rpartition(":") for host in hosts)]


def places_of(hosts: Sequence[tuple[str, int]]) -> list[Place]:
    """Returns the places of all ranks, in their order, from the hosts and their numbers of ranks."""
    across = Counter(local for _, ranks in hosts for local in range(ranks))
    before: Counter[int] = Counter()
    places = []
    for host, ranks in hosts:
        places += [Place(host, local, ranks, (before[local], across[local])) for local in range(ranks)]
        before.update(range(ranks))
    return places


def _variables(rank: int, size: int, place: Place) -> dict[str, str]:
    """Returns the rank's place in a world of `size` ranks, in torch's own names and in ours."""
    return {
        **({HOST: place.host} if place.host else {}),
        **dict(zip(CROSS, map(str, place.cross), strict=True)),
        **place_variables(rank, size, place.local_rank, place.local_size),
    }


_MEMBER = "CLIPSHIP_MEMBER"
"""Variable with the run's token and the number of a supervisor, by which its processes are found again."""
_OWN_TO_A_HOST = ("SSH_", "BASH_FUNC_", "OLDPWD")
_REMOTE_START = f"""\
import glob, json, os, signal, sys
message = json.loads(sys.stdin.buffer.readline())
os.environ.update(message["variables"])
mark = os.fsencode("{_MEMBER}=" + os.environ["{_MEMBER}"])
for place in glob.glob("/proc/[0-9]*/environ") if "{RESPAWNED}" in os.environ else ():
    try:
        if mark in open(place, "rb").read().split(b"\\0"):
            os.kill(int(place.split("/")[2]), signal.SIGKILL)
    except OSError:
        pass
try:
    os.chdir(message["folder"])
except OSError:
    pass
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.execvp(message["command"][0], message["command"])
"""
"""Python program for another host: reads the environment from stdin, becomes the rank's command.

If ssh lost the host, a supervisor may still run there, whose output goes nowhere: its successor kills it.
"""


def start_on(
    host: str, command: Sequence[str], variables: Mapping[str, str], ssh: Sequence[str], member: int
) -> StartedRank:
    """Starts supervisor number `member` on the host, with this process's environment and `variables`.

    `ssh` holds the words of the command that reaches other hosts. Raises OSError.
    """
    if is_here(host):
        return start_here(command, variables)
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OWN_TO_A_HOST)}
    mark = {_MEMBER: f"{os.environ.get(TOKEN, '')}.{member}"}
    message = {"variables": {**own, **variables, **mark}, "folder": os.getcwd(), "command": command}
    remote_command = shlex.join([sys.executable, "-P", "-c", _REMOTE_START])
    process = subprocess.Popen([*ssh, host, remote_command], stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.close()
    except BrokenPipeError:
        pass  # ssh has ended, and it prints why
    return StartedRank(process, host)


def start_here(
    command: Sequence[str], variables: Mapping[str, str], stdin: int | None = subprocess.DEVNULL
) -> StartedRank:
    """Starts the command on this machine, with this process's environment and `variables`.

    It gets SIGTERM if this process dies, which a launcher's end may do before its own: it saves and leaves.
    """
    return StartedRank(
        subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=stdin,
            preexec_fn=partial(signal_with_parent, SIGTERM),
        )
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
