"""A job that names something on a hub, and `clipship` in a process that knows hubs of this machine alone."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.jobs import VIT

_JOB = """
name = "fetched"
[data]
format = "synthetic"
synthetic_samples = 16
workers = 0
[model]
name = "{model}"
cache_dir = "cache"
{keys}
[optim]
global_batch_size = 4
steps = 1
"""


def write_hub_job(folder: Path, *keys: str) -> Path:
    """Writes a job of one step; `keys` are more lines of [model]."""
    path = folder / "job.toml"
    path.write_text(_JOB.format(model=VIT, keys="\n".join(keys)))
    return path


def clipship_with(folder: Path, variables: dict[str, str], *words: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command line in the folder, which is its home, with few variables beside these."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), **variables}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "trainer.cli.main", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
