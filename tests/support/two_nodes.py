"""Starts ranks as two nodes of this machine, as a launcher does that keeps the others going."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

from tests.support.ends import ROOT
from trainer.config.loader import load_job
from trainer.launch.rank_env import rank_environment
from trainer.supervise.tree import Rendezvous
from trainer.supervise.world import KEEPS_GOING, NODE, STARTED_HERE
from trainer.sysinfo.addresses import free_port


def run_on_two_nodes(job_path: Path) -> list[tuple[int, str]]:
    """Runs the job's ranks to their end, two on node a and two on b; returns exit code and stderr of each."""
    processes = begin_on_two_nodes(job_path, 2)
    errors = [process.communicate(timeout=280)[1] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, errors, strict=True)]


def begin_on_two_nodes(job_path: Path, each: int) -> "list[subprocess.Popen[str]]":
    """Starts the supervisors of `each` ranks on node a and as many on b."""
    rendezvous = Rendezvous("127.0.0.1", free_port("127.0.0.1"), secrets.token_hex(16))
    common = {
        **os.environ,
        **rank_environment(load_job(job_path), 2 * each),
        **rendezvous.variables(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "PYTHONPATH": str(ROOT),
        STARTED_HERE: "1",
        KEEPS_GOING: "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.support.faulty_rank", str(job_path)],
            env={**common, **_place(rank, each)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2 * each)
    ]


def _place(rank: int, each: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(2 * each),
        "LOCAL_RANK": str(rank % each),
        "LOCAL_WORLD_SIZE": str(each),
        NODE: "ab"[rank // each],
    }
