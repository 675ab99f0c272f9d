"""Starts the tests' Slurm and opens in it what the tests open: `python3 -m tests.cluster.slurm.alone`, for
tests/alone.sh.

Needs Python's standard library and the packages of packages.sh, and nothing else.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from tests.cluster.slurm.cluster import Cluster

TWO = ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1")


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="clipship-slurm-", dir="/var/tmp"))
    cluster = Cluster(folder)
    try:
        cluster.start()
        for mpi in ("none", "pmi2", "pmix"):
            _run(cluster, "srun", *TWO, f"--mpi={mpi}", "hostname")
        _run(cluster, "salloc", *TWO, "mpirun", "--allow-run-as-root", "hostname")
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _run(cluster: Cluster, *command: str) -> None:
    """Two nodes must answer, whichever are free, and nothing may complain of a library."""
    done = cluster.run(*command, check=False)
    print(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
    nodes = set(done.stdout.split())
    if done.returncode or len(nodes) != 2 or "library" in done.stderr:
        sys.exit("the packages of packages.sh are not enough for this")


if __name__ == "__main__":
    main()
