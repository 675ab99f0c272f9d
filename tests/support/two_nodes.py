"""Starts ranks as several nodes of this machine, as a launcher does that keeps the others going."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

from tests.support.ends import ROOT
from trainer.config.loader import load_job
from trainer.launch.rank_env import rank_environment
from trainer.sysinfo.addresses import free_port
from trainer.world.rendezvous import Rendezvous


def run_on_two_nodes(job_path: Path, each: int = 2, spares: int = 0) -> list[tuple[int, str]]:
    """Runs the job's ranks to their end, see `begin_on_two_nodes`; returns exit code and stderr of each."""
    processes = begin_on_two_nodes(job_path, each, spares)
    errors = [process.communicate(timeout=280)[1] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, errors, strict=True)]


def begin_on_two_nodes(job_path: Path, each: int, spares: int = 0) -> "list[subprocess.Popen[str]]":
    """Starts the supervisors of `each` ranks on node a and as many on b; the spare nodes are c and so on."""
    members = (2 + spares) * each
    rendezvous = Rendezvous("127.0.0.1", free_port("127.0.0.1"), secrets.token_hex(16))
    common = {
        **os.environ,
        **rank_environment(load_job(job_path), members),
        **rendezvous.variables(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "PYTHONPATH": str(ROOT),
        "CLIPSHIP_STARTED_HERE": "1",
        "CLIPSHIP_KEEPS_GOING": "1",
        "CLIPSHIP_SPARE_NODES": str(spares),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.support.faulty_rank", str(job_path)],
            env={**common, **_place(rank, each, members)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(members)
    ]


def _place(rank: int, each: int, members: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(members),
        "LOCAL_RANK": str(rank % each),
        "LOCAL_WORLD_SIZE": str(each),
        "CLIPSHIP_NODE": "abcd"[rank // each],
    }
