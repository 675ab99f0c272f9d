"""Starts a test program's ranks the way `clipship run` starts a job's.

`python -m tests.support.start BACKEND LAUNCHER RANKS MODULE [WORD ...]`.
"""

import json
import re
import subprocess
import sys
from typing import Any

from tests.support.jobs import tiny_job
from trainer.launch import local

TOLD = "told: "
"""Begin of a line that tells something, see `tests.support.rank.tell`."""
STARTS = [("torch", "clipship"), ("torch", "mpirun"), ("horovod", "mpirun"), ("horovod", "clipship")]
"""Every pair of backend and launcher that goes together."""


def start(
    backend: str, launcher: str, ranks: int, module: str, *words: str
) -> subprocess.CompletedProcess[str]:
    """Run the module on so many ranks, in a process of its own; stdout and stderr as text."""
    command = [sys.executable, "-m", "tests.support.start", backend, launcher, str(ranks), module, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


def told(backend: str, launcher: str, ranks: int, module: str, *words: str) -> list[Any]:
    """Runs the module on ranks that must end well; returns what they tell."""
    done = start(backend, launcher, ranks, module, *words)
    said = f"{backend} on {ranks} ranks under {launcher}:\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, said
    found = [json.loads(line) for line in re.findall(f"{TOLD}(.*)", done.stdout)]
    assert found, said
    return found


def main(backend: str, launcher: str, ranks: str, module: str, *words: str) -> int:
    job = tiny_job(comm={"backend": backend, "launcher": launcher})
    return local.start_ranks((sys.executable, "-m", module, *words), job, nproc=int(ranks), hosts=None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
