"""A job that names something on a hub, and `clipship` in a process that knows hubs of this machine alone."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.jobs import VIT
from tests.support.warm.start import warm_starts

Done = subprocess.CompletedProcess[str]
Clipship = Callable[..., Done]

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


@contextmanager
def clipship_at(home: Path, variables: dict[str, str]) -> Iterator[Clipship]:
    """Yields the command line in an environment of few variables beside these, as a function.

    It takes the words, by `cwd` a working folder, by `code` the exit code that it must end with, which None
    leaves open, and further variables. Its processes are forks of an interpreter that was told of the hub
    when it imported the hub's client.
    """
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), **variables}

    def clipship(*words: str | Path, cwd: Path, code: int | None = 0, **more: str) -> Done:
        command = [sys.executable, "-m", "trainer.cli.main", *map(str, words)]
        told = {**environment, **more}
        done = subprocess.run(command, cwd=cwd, env=told, capture_output=True, text=True, timeout=300)
        assert code in (None, done.returncode), done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with warm_starts(environment):
        yield clipship
