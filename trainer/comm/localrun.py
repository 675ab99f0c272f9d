"""Starts ranks as processes of this machine and waits for them.

`python -m trainer.comm.localrun --ranks N -- COMMAND ...` is a process of its own, so that its end ends the
ranks too. It listens nowhere: torch's ranks meet at MASTER_ADDR and MASTER_PORT, which rank 0 serves. It
imports no torch, unlike torchrun, whose import alone takes seconds.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from types import FrameType

from trainer.supervise.world import STARTED_HERE
from trainer.sysinfo.parent import signal_with_parent

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL for the ranks that are left when one has failed."""
_POLL_S = 0.1
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
"""Prefixes of torchrun's variables: around this process they describe another world."""


def main(arguments: Sequence[str]) -> int:
    """Starts the ranks and waits for them; returns the exit code of the first that failed.

    The code is 128 + N if signal N ended that rank or this process.
    """
    parser = argparse.ArgumentParser(prog="trainer.comm.localrun")
    parser.add_argument("--ranks", type=int, required=True, help="Number of ranks, all on this machine.")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    received = collect_signals()
    own = {name: value for name, value in os.environ.items() if not name.startswith(_TORCHRUN_PREFIXES)}
    ranks = [
        # A rank's supervisor that gets SIGTERM saves and leaves: this process may be killed before it.
        subprocess.Popen(
            options.command,
            env={**own, **_variables(rank, options.ranks)},
            preexec_fn=partial(signal_with_parent, signal.SIGTERM),
        )
        for rank in range(options.ranks)
    ]
    return wait_for_ranks(ranks, received, "clipship")


def _variables(rank: int, size: int) -> dict[str, str]:
    """Returns the rank's place in a world of `size` ranks on this machine, in torch's own names."""
    return {
        STARTED_HERE: "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
    }


def collect_signals() -> list[int]:
    """Collects SIGTERM and SIGINT from now on; returns the list to which they are added."""
    received: list[int] = []

    def collect(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, collect)
    return received


def wait_for_ranks(ranks: Sequence["subprocess.Popen[bytes]"], received: Sequence[int], launcher: str) -> int:
    """Waits until all ranks have ended; the first failure, or a received signal, ends the others.

    Returns the exit code; `launcher` begins the line that names the failed rank.
    """
    code, deadline = 0, float("inf")
    while None in [rank.poll() for rank in ranks]:
        if deadline == float("inf"):
            code = _first_failure(ranks, launcher) or (128 + received[0] if received else 0)
            if code:
                deadline = time.monotonic() + GRACE_S
                _signal_all(ranks, signal.SIGTERM)
        elif time.monotonic() > deadline:
            _signal_all(ranks, signal.SIGKILL)
        time.sleep(_POLL_S)
    return code or _first_failure(ranks, launcher)


def _first_failure(ranks: Sequence["subprocess.Popen[bytes]"], launcher: str) -> int:
    """Returns the exit code of the lowest failed rank and names it on stderr; 0 if none failed."""
    for number, rank in enumerate(ranks):
        if rank.returncode:
            how = (
                f"with exit code {rank.returncode}"
                if rank.returncode > 0
                else f"by signal {signal.Signals(-rank.returncode).name}"
            )
            print(f"{launcher}: rank {number} ended {how}, so the other ranks were stopped", file=sys.stderr)
            return rank.returncode if rank.returncode > 0 else 128 - rank.returncode
    return 0


def _signal_all(ranks: Sequence["subprocess.Popen[bytes]"], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
