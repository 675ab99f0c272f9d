"""Nodes of `benchmarks.goodput`: names on this machine, at which processes run that can be killed together.

Needs root, for a host name of each node. A program named ssh, first on PATH, reaches them, so that what
starts ranks on several hosts works as it is.
"""

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NAMES = ("node-a", "node-b", "node-c")
"""Two nodes and a spare."""
DOWN_S = 20.0
"""Seconds after which a lost node can be reached again."""
_NODE, _RUN = "GOODPUT_NODE", "GOODPUT_RUN"
_SSH = """\
#!/bin/sh
while :; do
    case "$1" in
        -G) echo "hostname 127.0.0.1"; exit ;;
        -o | -i | -p | -l | -F) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
host=$1
shift
if [ -e "{folder}/down-$host" ]; then
    echo "ssh: connect to host $host: No route to host" >&2
    exit 255
fi
{node}=$host unshare -m -u sh -c \
    'mount --bind {folder}/names /etc/hosts && hostname "$0" && exec sh -c "$1"' "$host" "$*"
code=$?
[ $code -lt 128 ] || exit 255
exit $code
"""


def missing() -> str | None:
    """Names what this machine lacks for nodes; None if it lacks nothing."""
    if os.geteuid() != 0:
        return "root"
    return next((name for name in ("unshare", "mount", "hostname") if shutil.which(name) is None), None)


@dataclass(frozen=True)
class Process:
    """Process of a run at one moment."""

    pid: int
    parent: int
    session: int
    words: Sequence[str]
    variables: dict[str, str]

    @property
    def node(self) -> str:
        return self.variables.get(_NODE, "")

    def runs(self, module: str) -> bool:
        return any(module in word for word in self.words)

    @property
    def alive(self) -> bool:
        with suppress(OSError):
            return _stat(self.pid)[0] != "Z"
        return False

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def files(self) -> list[str]:
        """Returns the paths of the files that it has open."""
        with suppress(OSError):
            return [os.readlink(entry) for entry in Path(f"/proc/{self.pid}/fd").iterdir()]
        return []


class Nodes:
    """The nodes of one run, whose processes carry its token."""

    def __init__(self, folder: Path, token: str) -> None:
        self._folder, self._token = folder, token
        self._timers: list[threading.Timer] = []
        programs = folder / "programs"
        programs.mkdir(parents=True, exist_ok=True)
        (programs / "ssh").write_text(_SSH.format(folder=folder, node=_NODE))
        (programs / "ssh").chmod(0o755)
        # Horovod's Gloo looks its own host's name up, and crashes if there is no such name.
        (folder / "names").write_text("".join(f"127.0.0.1 {name}\n" for name in ("localhost", *NAMES)))
        self.variables = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",  # all nodes share the cores of this machine
            _RUN: token,
        }

    def processes(self) -> list[Process]:
        """Returns all living processes of the run on its nodes."""
        found = (_process(int(entry.name)) for entry in Path("/proc").glob("[0-9]*"))
        return [
            process
            for process in found
            if process is not None and process.variables.get(_RUN) == self._token and process.node
        ]

    def lose(self, node: str, first: str) -> None:
        """Kills all processes of a node at once, first those of one module; it is back after DOWN_S."""
        mark = self._folder / f"down-{node}"
        mark.touch()
        timer = threading.Timer(DOWN_S, mark.unlink, [True])
        timer.daemon = True
        timer.start()
        self._timers.append(timer)
        here = [process for process in self.processes() if process.node == node]
        for process in sorted(here, key=lambda process: not process.runs(first)):
            process.signal(signal.SIGKILL)

    def kill_all(self) -> None:
        """Ends all processes of the run."""
        for process in self.processes():
            process.signal(signal.SIGKILL)

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self.kill_all()


def ranks_by_log(processes: Iterable[Process]) -> dict[int, Process]:
    """Returns the ranks' processes: each leads a session and has its rank's log open."""
    ranks = {}
    for process in processes:
        if process.pid == process.session:
            for path in process.files():
                if match := re.search(r"/logs/rank-(\d+)\.log$", path):
                    ranks[int(match[1])] = process
    return ranks


def _process(pid: int) -> Process | None:
    try:
        place = Path(f"/proc/{pid}")
        variables = dict(
            pair.partition("=")[::2] for pair in (place / "environ").read_text(errors="replace").split("\0")
        )
        if _RUN not in variables:
            return None
        words = (place / "cmdline").read_text(errors="replace").split("\0")
        state, parent, _group, session = _stat(pid)[:4]
    except (OSError, ValueError):
        return None
    return None if state == "Z" else Process(pid, int(parent), int(session), words, variables)


def _stat(pid: int) -> list[str]:
    """Returns state, parent, process group and session, among others."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
