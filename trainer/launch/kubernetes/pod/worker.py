"""First process of a worker pod: runs sshd, and gives ranks time to save when the pod is asked to stop.

Run as `python -m trainer.launch.kubernetes.pod.worker COMMAND ...`. Asked to stop (a drained node, a deleted
pod), it takes no new connections, asks the ranks' supervisors to save and leave, and waits for them;
Kubernetes kills what is left after the pod's grace period. It also reaps orphans, as a first process must.
Imports no torch.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import EXIT_FAILED
from trainer.sysinfo.children import processes_with, reap, signal_all
from trainer.sysinfo.forks import adopt_orphans
from trainer.sysinfo.signals import reset_inherited_signals
from trainer.text.terminal import say

_ASKED = (signal.SIGTERM, signal.SIGINT)
_WATCHED = (*_ASKED, signal.SIGCHLD)
_POLL_S = 0.2
_IDLE_S = 3600.0
_SUPERVISOR = b"\0-m\0trainer.rank\0"


def main(command: Sequence[str]) -> int:
    """Run the command; returns 0 after a request to stop.

    If the command ends without a request, that is a failure, and Kubernetes restarts the container.
    """
    reset_inherited_signals()
    adopt_orphans()  # process 1 of a container has them in any case
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)  # before the child starts, so that no signal is missed
    child = os.posix_spawnp(command[0], list(command), os.environ, setsigmask=[])
    asked = False
    while True:
        number = _next_signal(_POLL_S if asked else _IDLE_S)
        ended = reap().get(child)
        code = None if ended is None else abs(ended)
        if number in _ASKED:
            if not asked:
                say("asked to stop: no new ranks start; running ranks save and exit")
                signal_all([child], signal.SIGTERM)  # only the listening process ends, its connections stay
            signal_all(supervisors(), signal.SIGTERM)
            asked = True
        if asked and not supervisors():
            return 0
        if code is not None and not asked:
            say(f"{command[0]} ended with exit code {code}")
            return code or EXIT_FAILED


def supervisors() -> list[int]:
    """Returns the process ids of the supervisors of this pod's ranks.

    They are descendants of this process.
    """
    parents = {int(entry.name): _parent(entry) for entry in Path("/proc").glob("[0-9]*")}
    family = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return processes_with(_SUPERVISOR, "cmdline", sorted(family))


def _next_signal(limit_s: float) -> int | None:
    received = signal.sigtimedwait(_WATCHED, limit_s)
    return None if received is None else received.si_signo


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError):  # it has ended
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
