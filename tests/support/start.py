"""Starts a test program's ranks the way `clipship run` starts a job's.

`python -m tests.support.start BACKEND LAUNCHER RANKS MODULE [WORD ...]`.
"""

import subprocess
import sys

from tests.support.jobs import tiny_job
from trainer.launch.local import start_ranks

STARTS = [("torch", "clipship"), ("torch", "mpirun"), ("horovod", "mpirun"), ("horovod", "clipship")]
"""Every pair of backend and launcher that goes together."""


def start(
    backend: str, launcher: str, ranks: int, module: str, *words: str
) -> subprocess.CompletedProcess[str]:
    """Run the module on so many ranks, in a process of its own; stdout and stderr as text."""
    command = [sys.executable, "-m", "tests.support.start", backend, launcher, str(ranks), module, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


def main(backend: str, launcher: str, ranks: str, module: str, *words: str) -> int:
    job = tiny_job(comm={"backend": backend, "launcher": launcher})
    return start_ranks((sys.executable, "-m", module, *words), job, nproc=int(ranks), hosts=None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
